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
  const { tag, mark } = node;
  const showIn = (tab) => button(`Show in ${tab}`, () => go({ tab }));
  return clear(
    panel,
    panelHead(node, () => go({ node: null })),
    el(
      "div",
      { class: "chips" },
      tag && chip("role", tag.role),
      tag && tag.bucket !== null && chip("bucket", `bucket ${tag.bucket}`),
      tag && tag.origin && chip("", `by ${tag.origin}`),
      tag && tag.flags && chip("", tag.flags),
      mark && chip("", mark, "The recompute policy that the partitioner reads for this value"),
      here !== graph && chip("removed", "removed by this pass"),
      changesHere(node).map(([kind, detail]) => chip(kind, kind, detail)),
    ),
    el("code", { class: "code" }, wrappingCode(node.code)),
    facts(node, here),
    collectiveFacts(node, here),
    node.source && node.source.file ? sourceFacts(node.source) : parameterSources(node),
    links("inputs", node.inputs, here),
    links("users", here.users.get(node.id) || [], here),
    el(
      "div",
      { class: "actions" },
      ["diff", "memory", "timeline", "listing"].filter((tab) => tab !== state.tab).map(showIn),
    ),
  );
}

function panelHead(node, close) {
  const props = {
    "aria-label": "Close the node's panel",
    class: "quiet",
    title: "Close (Escape)",
  };
  const title = el("h2", {}, wrapping(node.name));
  return el("div", { class: "panel-head" }, title, button("✕", close, props));
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
    panelHead(node, close),
    el("p", { class: "muted" }, `only in ${sideName(side)}`),
    el("code", { class: "code" }, wrappingCode(node.code)),
    el("p", {}, wrappingCode(node.note)),
  );
}

// [kind, detail] of what the shown pass changed in a node.
function changesHere(node) {
  return (current.changed && current.graph.changes.get(node.id)) || [];
}

function facts(node, graph) {
  const at = graph.index.get(node.id);
  return definitions([
    ["op", node.op === "call_function" ? node.target : `${node.op} ${node.target}`],
    ["output", node.values && `${node.values} · ${bytesText(node.nbytes)}`],
    ["parameters", someOf(node.params, 6)],
    ["bytes alive", bytesText(graph.curves.live[at])],
    ...allocations(node, graph),
    ["estimated time", node.cost ? timeText(node.cost) : ""],
    ["measured time", measuredNode(graph, node)],
    ["position", `${countText(at + 1)} of ${countText(graph.nodes.length)}`],
    ...changesHere(node),
  ]);
}

// What a node allocates, for whom, and until when. A bucket may allocate hundreds of buffers.
function allocations(node, graph) {
  const most = 4;
  const rows = node.buffers.slice(0, most).map(({ nbytes, kind, params, last }) => [
    "allocates",
    [
      `${bytesText(nbytes)} ${kind}`,
      params.length === 1 && node.params.length > 1 ? ` of ${params[0]}` : "",
      ", needed until ",
      nodeLink(graph.node(last) || node),
    ],
  ]);
  const rest = node.buffers.slice(most);
  const bytes = bytesText(sumOf(rest, (buffer) => buffer.nbytes));
  if (rest.length) rows.push(["", `and ${plural(rest.length, "buffer")} more, ${bytes}`]);
  return rows;
}

function collectiveFacts(node, graph) {
  const found = graph.collectives.find((each) => each.id === node.id);
  if (!found) return null;
  const { kind, group, ranks, nbytes, route, decision } = node.collective;
  const wait = graph.node(found.wait);
  const later = `${plural(found.distance, "node")} and ${timeText(found.compute)} of compute`;
  const rows = [
    ["collective", `${kind}, group ${group} of ${plural(ranks, "rank")}`],
    ["input", bytesText(nbytes)],
    ["estimated time", timeText(found.time)],
    ["exposed", exposedText(found)],
    ["measured", measuredCollective(found)],
    ["wait", wait && `${wait.name}, after ${later}`],
    ["route", route],
    ["decision", decision],
  ];
  return definitions(rows, "boxed");
}

// Exposed time, and how much of it the collective spends behind earlier ones.
function exposedText({ exposed, queued }) {
  const behind = `of which ${timeText(queued)} is queueing behind earlier collectives`;
  return queued ? `${timeText(exposed)}, ${behind}` : timeText(exposed);
}

// The lines that read the parameters of a node, such as a bucket, that has no line of its own.
function parameterSources(node) {
  const found = new Map();
  for (const name of node.params) {
    const place = (current.compile.parameters[name] || [])[4];
    if (place) listIn(found, `${place[0]}:${place[1]}`).push(name);
  }
  if (!found.size) return null;
  const readers = ([place, names]) =>
    el(
      "p",
      { title: names.join("\n") },
      el("b", {}, shortPath(place)),
      " ",
      wrappingCode(someOf(names, 2)),
    );
  const caption = `its parameters are read at ${plural(found.size, "line")}`;
  return el("figure", { class: "sources" }, el("figcaption", {}, caption), [...found].map(readers));
}

function sourceFacts({ file, line, text, module }) {
  const lines = current.compile.sources[file];
  const from = Math.max(1, line - 2);
  const shown = lines
    ? lines.slice(from - 1, line + 2).map((code, at) => [from + at, code])
    : [[line, text]];
  const snippet = shown.map(([number, code]) =>
    span(number === line ? "here" : "", `${String(number).padStart(4)}  ${code}`),
  );
  return el(
    "figure",
    {},
    el("figcaption", {}, `${shortPath(file)}:${line}`, module ? ` · ${module}` : ""),
    el("pre", { class: "snippet" }, snippet),
    button("Show in source", () => go({ tab: "source" })),
  );
}

function links(title, ids, graph) {
  const nodes = ids.map((id) => graph.node(id)).filter(Boolean);
  if (!nodes.length) return null;
  const most = 24;
  return el(
    "div",
    { class: "links" },
    el("h3", {}, `${title} (${countText(nodes.length)})`),
    nodes.slice(0, most).map(nodeLink),
    nodes.length > most && muted(` and ${countText(nodes.length - most)} more`),
  );
}
