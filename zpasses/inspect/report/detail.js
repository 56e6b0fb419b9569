// The panel with all facts about the selected node.

function drawDetail(panel) {
  const graph = current.graph,
    before = current.before;
  const node =
    graph && state.node !== null
      ? graph.node(state.node) || (before && before.node(state.node))
      : null;
  if (!node && state.tab === "compare" && state.view.other) return drawOtherNode(panel);
  panel.hidden = !node;
  if (!node) return clear(panel);
  const here = graph.node(node.id) ? graph : before;
  clear(
    panel,
    el(
      "div",
      { class: "panel-head" },
      el("h2", {}, wrapping(node.name)),
      button("✕", () => go({ node: null }), {
        "aria-label": "Close the node's panel",
        class: "quiet",
        title: "Close (Escape)",
      }),
    ),
    el(
      "div",
      { class: "chips" },
      node.tag && chip("role", node.tag.role),
      node.tag && node.tag.bucket !== null && chip("bucket", `bucket ${node.tag.bucket}`),
      node.tag && node.tag.origin && chip("", `by ${node.tag.origin}`),
      node.tag && node.tag.flags && chip("", node.tag.flags),
      node.mark &&
        chip("", node.mark, "The recompute policy that the partitioner reads for this value"),
      here !== graph && chip("removed", "removed by this pass"),
      (current.changed ? graph.changes.get(node.id) || [] : []).map(([kind, detail]) =>
        chip(kind, kind, detail),
      ),
    ),
    el("code", { class: "code" }, wrappingCode(node.code)),
    facts(node, here),
    collectiveFacts(node, here),
    sourceFacts(node),
    links("inputs", node.inputs, here),
    links("users", here.users.get(node.id) || [], here),
    el(
      "div",
      { class: "actions" },
      ["diff", "memory", "timeline", "listing"]
        .filter((tab) => tab !== state.tab)
        .map((tab) => button(`Show in ${tab}`, () => go({ tab }))),
    ),
  );
}

// A node that only the other graph of a comparison has.
function drawOtherNode(panel) {
  const side = otherSide();
  const node = side && side.graph && side.graph.node(+state.view.other);
  panel.hidden = !node;
  if (!node) return clear(panel);
  const close = () => {
    keep({ other: "" });
    go({ node: null });
  };
  return clear(
    panel,
    el(
      "div",
      { class: "panel-head" },
      el("h2", {}, wrapping(node.name)),
      button("✕", close, { "aria-label": "Close the node's panel", class: "quiet" }),
    ),
    el("p", { class: "muted" }, `only in ${sideName(side)}`),
    el("code", { class: "code" }, wrappingCode(node.code)),
    el("p", {}, wrappingCode(node.note)),
  );
}

function facts(node, graph) {
  const at = graph.index.get(node.id);
  const changes = current.changed ? current.graph.changes.get(node.id) || [] : [];
  const rows = [
    ["op", node.op === "call_function" ? node.target : `${node.op} ${node.target}`],
    ["output", node.values && `${node.values} · ${bytesText(node.nbytes)}`],
    ["parameters", someOf(node.params, 6)],
    ["bytes alive", bytesText(graph.curves.live[at])],
    ...allocations(node, graph),
    ["estimated time", node.cost ? timeText(node.cost) : ""],
    ["measured time", measuredNode(graph, node)],
    ["position", `${countText(at + 1)} of ${countText(graph.nodes.length)}`],
    ...changes.map(([kind, detail]) => [kind, detail]),
  ];
  return el(
    "dl",
    {},
    rows
      .filter(([, text]) => text)
      .map(([name, text]) => [el("dt", {}, name), el("dd", {}, wrappingAll(text))]),
  );
}

// Texts with names, among elements.
function wrappingAll(parts) {
  return [parts].flat().flatMap((part) => (typeof part === "string" ? wrapping(part) : [part]));
}

// What a node allocates, for whom, and until when. A bucket may allocate hundreds of buffers.
function allocations(node, graph) {
  const most = 4;
  const rows = node.buffers.slice(0, most).map((buffer) => [
    "allocates",
    [
      `${bytesText(buffer.nbytes)} ${buffer.kind}`,
      buffer.params.length === 1 && node.params.length > 1 ? ` of ${buffer.params[0]}` : "",
      ", needed until ",
      nodeLink(graph.node(buffer.last) || node),
    ],
  ]);
  const rest = node.buffers.slice(most);
  const bytes = rest.reduce((sum, buffer) => sum + buffer.nbytes, 0);
  return rest.length
    ? [...rows, ["", `and ${plural(rest.length, "buffer")} more, ${bytesText(bytes)}`]]
    : rows;
}

function collectiveFacts(node, graph) {
  const collective = graph.collectives.find((each) => each.id === node.id);
  if (!collective) return null;
  const wait = graph.node(collective.wait);
  const rows = [
    [
      "collective",
      `${node.collective.kind}, group ${node.collective.group} of ` +
        plural(node.collective.ranks, "rank"),
    ],
    ["input", bytesText(node.collective.nbytes)],
    ["estimated time", timeText(collective.time)],
    ["exposed", exposedText(collective)],
    [
      "measured",
      measuredCollective(collective),
    ],
    [
      "wait",
      wait
        ? `${wait.name}, after ${plural(collective.distance, "node")} and ` +
          `${timeText(collective.compute)} of compute`
        : "",
    ],
    ["route", node.collective.route],
    ["decision", node.collective.decision],
  ];
  return el(
    "dl",
    { class: "boxed" },
    rows
      .filter(([, text]) => text)
      .map(([name, text]) => [el("dt", {}, name), el("dd", {}, wrappingAll(text))]),
  );
}

// Exposed time, and how much of it the collective spends behind earlier ones of its group.
function exposedText(collective) {
  if (!collective.queued) return timeText(collective.exposed);
  return (
    `${timeText(collective.exposed)}, of which ${timeText(collective.queued)} is queueing behind ` +
    "earlier collectives of the group"
  );
}

// The lines that read the parameters of a node, such as a bucket, that has no line of its own.
function parameterSources(node) {
  const found = new Map();
  for (const name of node.params) {
    const place = (current.compile.parameters[name] || [])[4];
    if (place) listIn(found, `${place[0]}:${place[1]}`).push({ name, module: place[3] });
  }
  if (!found.size) return null;
  return el(
    "figure",
    { class: "sources" },
    el("figcaption", {}, `its parameters are read at ${plural(found.size, "line")}`),
    [...found].map(([place, readers]) =>
      el(
        "p",
        { title: readers.map(({ name }) => name).join("\n") },
        el("b", {}, shortPath(place)),
        " ",
        wrappingCode(
          someOf(
            readers.map(({ name }) => name),
            2,
          ),
        ),
      ),
    ),
  );
}

function sourceFacts(node) {
  if (!node.source || !node.source.file) return node.params.length ? parameterSources(node) : null;
  const { file, line, module } = node.source;
  const text = current.compile.sources[file];
  const from = Math.max(1, line - 2);
  const shown = text
    ? text.slice(from - 1, line + 2).map((code, at) => [from + at, code])
    : [[line, node.source.text]];
  return el(
    "figure",
    {},
    el("figcaption", {}, `${shortPath(file)}:${line}`, module ? ` · ${module}` : ""),
    el(
      "pre",
      { class: "snippet" },
      shown.map(([number, code]) =>
        el(
          "span",
          { class: number === line ? "here" : "" },
          `${String(number).padStart(4)}  ${code}`,
        ),
      ),
    ),
    button("Show in source", () => go({ tab: "source" })),
  );
}

function someOf(names, most) {
  return names.length > most
    ? `${names.slice(0, most).join(", ")} and ${countText(names.length - most)} more`
    : names.join(", ");
}

function shortPath(path) {
  return path.split("/").slice(-2).join("/");
}

function links(title, ids, graph) {
  const nodes = ids.map((id) => graph.node(id)).filter(Boolean);
  if (!nodes.length) return null;
  const most = 24;
  return el(
    "div",
    { class: "links" },
    el("h3", {}, `${title} (${countText(nodes.length)})`),
    nodes
      .slice(0, most)
      .map((node) => button(wrapping(node.name), () => go({ node: node.id }), { class: "link" })),
    nodes.length > most && el("span", { class: "muted" }, ` and ${countText(nodes.length - most)} more`),
  );
}
