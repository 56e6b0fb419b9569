// What is alive while one node runs: by kind, and each buffer or the sums of modules.

const BUFFER_COLUMNS = [
  ["allocated by", "The node that allocates the memory"],
  ["kind", "What the memory holds"],
  ["bytes", "Size of the allocation"],
  ["parameters", "Parameters whose data it holds"],
  ["lifetime", "From the first to the last node of the graph; the mark is the shown node"],
  ["needed until", "The last node that needs it"],
];

function drawAlive(side, graph, at, before) {
  const alive = graph.alive(at),
    node = graph.nodes[at],
    whole = graph.curves.live[at] || 1;
  const { live, peak } = graph.curves;
  const percentOfPeak = Math.round((100 * live[at]) / (live[peak] || 1));
  const kinds = graph.curves.kinds
    .map((kind) => [kind, graph.curves.byKind[kind][at]])
    .filter(([, size]) => size);
  const moved = ((graph.step.diff || {}).moved || []).some(([id]) => id === node.id);
  const place = before && !moved ? before.index.get(node.id) : undefined;
  const most = 60;
  clear(
    side,
    el(
      "div",
      { class: "alive-head" },
      el("h2", {}, bytesText(graph.curves.live[at]), el("small", {}, " alive while ")),
      button(node.name, () => go({ node: node.id }), { class: "link" }),
      el(
        "small",
        { class: "muted" },
        at === graph.curves.peak ? " (the peak)" : ` ${percentOfPeak} % of the peak`,
      ),
      place !== undefined &&
        el(
          "small",
          {},
          ` · before this pass ${bytesText(before.curves.live[place])} `,
          delta(before.curves.live[place], graph.curves.live[at]),
        ),
    ),
    el(
      "div",
      {
        class: "stack",
        role: "img",
        "aria-label": kinds.map(([kind, size]) => `${kind} ${bytesText(size)}`).join(", "),
      },
      kinds.map(([kind, size]) =>
        el("i", {
          title: `${kind} ${bytesText(size)}`,
          style: {
            background: `var(--kind-${KINDS.includes(kind) ? kind : "other"})`,
            width: `${(100 * size) / whole}%`,
          },
        }),
      ),
    ),
    el(
      "p",
      { class: "kinds" },
      kinds.map(([kind, size]) => el("span", {}, el("b", {}, kind), ` ${bytesText(size)}`)),
    ),
    el(
      "div",
      { class: "bar" },
      el(
        "label",
        { title: "Equal layers are one row" },
        el("input", {
          type: "checkbox",
          checked: state.view.by === "module",
          "aria-label": "Sums by module",
          onchange: (event) => {
            keep({ by: event.target.checked ? "module" : "" });
            drawAlive(side, graph, at, before);
          },
        }),
        " sums by module",
      ),
    ),
    state.view.by === "module" ? moduleTable(alive, whole) : bufferTable(graph, alive.slice(0, most), at),
    state.view.by !== "module" &&
      alive.length > most &&
      el("p", { class: "muted" }, `and ${countText(alive.length - most)} smaller buffers`),
  );
}

function bufferTable(graph, alive, at) {
  const count = Math.max(graph.nodes.length, 1);
  return el("div", { class: "scroll" }, el(
      "table",
      { class: "compact buffers" },
      tableHead(BUFFER_COLUMNS, (i) => i === 2),
      el(
        "tbody",
        {},
        alive.map((buffer) =>
          el(
            "tr",
            {},
            el("td", {}, nodeLink(buffer.node)),
            el(
              "td",
              { title: buffer.kind },
              el("i", {
                class: "dot",
                style: {
                  background: `var(--kind-${KINDS.includes(buffer.kind) ? buffer.kind : "other"})`,
                },
              }),
              el("span", { class: "kind" }, buffer.kind),
            ),
            el("td", { class: "right" }, bytesText(buffer.nbytes)),
            el(
              "td",
              { class: "wrap", title: buffer.params.join("\n") },
              wrapping(buffer.params[0] || ""),
              buffer.params.length > 1 && ` and ${countText(buffer.params.length - 1)} more`,
            ),
            el("td", {}, lifetime(graph, buffer, at, count)),
            el("td", {}, nodeLink(graph.node(buffer.last))),
          ),
        ),
      ),
    ));
}

// When a buffer lives: a band along the graph, with a mark at the shown node.
function lifetime(graph, buffer, at, count) {
  const place = (index) => `${((100 * index) / count).toFixed(2)}%`;
  const text = `alive from ${graph.nodes[buffer.from].name} to ${graph.nodes[buffer.to].name}`;
  return el(
    "button",
    {
      type: "button",
      class: "lifetime",
      title: `${text}. Select the node that allocates it.`,
      "aria-label": text,
      onclick: () => go({ node: buffer.node.id }),
    },
    el("i", {
      style: {
        left: place(buffer.from),
        width: place(Math.max(buffer.to - buffer.from + 1, count / 100)),
        background: kindColor(buffer.kind),
      },
    }),
    el("i", { class: "now", style: { left: place(at) } }),
  );
}

function moduleTable(alive, whole) {
  const folded = foldFigures(bytesByModule(alive));
  const columns = [
    ["module", "Equal layers are one row"],
    ["times", "Number of layers"],
    ["bytes", "Sum of all layers"],
    ["share", "Of everything that is alive"],
    ["each", "Bytes of one layer, from the least to the most"],
    ["not as the others", "Layers that differ from the median by more than 5 %"],
  ];
  return el(
    "div",
    { class: "scroll" },
    el(
      "table",
      { class: "compact" },
      tableHead(columns, (at) => at > 0 && at < 5),
      el(
        "tbody",
        {},
        folded.map(({ name, members, total }) => {
          const size = ([, bytes]) => bytes;
          const odd = members.length > 1 ? oddOnes(members, size) : [];
          const cells = [
            countText(members.length),
            bytesText(total),
            `${((100 * total) / whole).toFixed(1)} %`,
            rangeText(members, size, bytesText),
          ];
          return el(
            "tr",
            {},
            el("td", {}, name || "(no module)"),
            cells.map((text) => el("td", { class: "right" }, text)),
            el(
              "td",
              {},
              odd.length < members.length
                ? someOf(
                    odd.map(([module]) => module),
                    3,
                  )
                : "",
            ),
          );
        }),
      ),
    ),
  );
}
