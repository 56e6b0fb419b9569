// What is alive while one node runs: by kind, and each buffer or the sums of modules.

const BUFFER_COLUMNS = [
  ["allocated by", "The node that allocates the memory"],
  ["kind", "What the memory holds"],
  ["bytes", "Size of the allocation", "right"],
  ["parameters", "Parameters whose data it holds"],
  ["lifetime", "From the first to the last node of the graph; the mark is the shown node"],
  ["needed until", "The last node that needs it"],
];
const MOST_BUFFERS = 60;

function drawAlive(side, graph, at, before) {
  const alive = graph.alive(at),
    node = graph.nodes[at],
    byModule = state.view.by === "module";
  const { live, peak } = graph.curves;
  const whole = live[at] || 1;
  const kinds = graph.curves.kinds
    .map((kind) => [kind, graph.curves.byKind[kind][at]])
    .filter(([, size]) => size);
  const place = before && !graph.moved.has(node.id) ? before.index.get(node.id) : undefined;
  const was = place !== undefined && before.curves.live[place];
  const ofPeak = `${Math.round((100 * live[at]) / (live[peak] || 1))} % of the peak`;
  const small = (...parts) => el("small", {}, parts);
  const sums = (checked) => {
    keep({ by: checked ? "module" : "" });
    drawAlive(side, graph, at, before);
  };
  const label = { "aria-label": "Sums by module" };
  clear(
    side,
    el(
      "div",
      { class: "alive-head" },
      el("h2", {}, bytesText(live[at]), small(" alive while ")),
      linkButton(node.name, () => go({ node: node.id })),
      el("small", { class: "muted" }, at === peak ? " (the peak)" : ` ${ofPeak}`),
      place !== undefined && small(` · before this pass ${bytesText(was)} `, delta(was, live[at])),
    ),
    stack(
      kinds.map(([kind, size]) => `${kind} ${bytesText(size)}`).join(", "),
      kinds.map(([kind, size]) => [kindColor(kind), size / whole, `${kind} ${bytesText(size)}`]),
    ),
    el(
      "p",
      { class: "kinds" },
      kinds.map(([kind, size]) => el("span", {}, el("b", {}, kind), ` ${bytesText(size)}`)),
    ),
    bar(checkBox("sums by module", byModule, sums, label, "Equal layers are one row")),
    byModule ? moduleTable(alive, whole) : bufferTable(graph, alive.slice(0, MOST_BUFFERS), at),
    !byModule &&
      alive.length > MOST_BUFFERS &&
      el("p", { class: "muted" }, `and ${countText(alive.length - MOST_BUFFERS)} smaller buffers`),
  );
}

function bufferTable(graph, alive, at) {
  const rows = alive.map(({ node, kind, nbytes, params, from, to, last }) => [
    nodeLink(node),
    el("td", { title: kind }, kindDot(kind), span("kind", kind)),
    bytesText(nbytes),
    el(
      "td",
      { class: "wrap", title: params.join("\n") },
      wrapping(params[0] || ""),
      params.length > 1 && ` and ${countText(params.length - 1)} more`,
    ),
    lifetime(graph, { node, kind, from, to }, at),
    nodeLink(graph.node(last)),
  ]);
  return table(BUFFER_COLUMNS, rows, "compact buffers");
}

// When a buffer lives: a band along the graph, with a mark at the shown node.
function lifetime(graph, { node, kind, from, to }, at) {
  const count = graph.nodes.length;
  const place = (index) => `${((100 * index) / count).toFixed(2)}%`;
  const text = `alive from ${graph.nodes[from].name} to ${graph.nodes[to].name}`;
  const width = place(Math.max(to - from + 1, count / 100));
  const band = { left: place(from), width, background: kindColor(kind) };
  return button(
    [el("i", { style: band }), el("i", { class: "now", style: { left: place(at) } })],
    () => go({ node: node.id }),
    {
      class: "lifetime",
      title: `${text}. Select the node that allocates it.`,
      "aria-label": text,
    },
  );
}

const MEMORY_COLUMNS = [
  ["module", "Equal layers are one row"],
  ["times", "Number of layers", "right"],
  ["bytes", "Sum of all layers", "right"],
  ["share", "Of everything that is alive", "right"],
  ["each", "Bytes of one layer, from the least to the most", "right"],
  ["not as the others", "Layers that differ from the median by more than 5 %"],
];

function moduleTable(alive, whole) {
  const size = ([, bytes]) => bytes;
  const rows = foldFigures(bytesByModule(alive)).map(({ name, members, total }) => [
    name || "(no module)",
    countText(members.length),
    bytesText(total),
    `${((100 * total) / whole).toFixed(1)} %`,
    rangeText(members, size, bytesText),
    oddText(members, size, ([module]) => module),
  ]);
  return table(MEMORY_COLUMNS, rows);
}
