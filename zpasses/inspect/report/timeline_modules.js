// What the timeline says about modules: the names above the stream of compute, and the table of
// times. Equal layers that follow each other are one group.

const LEAST_LABEL = 24; // Pixels below which a layer has no label of its own.

// [{name, blocks: [{layer, start, end, compute, exposed, at}], start, end}], in the order of time.
// Compute waits at the start of a block, so the wait counts for the block that it delays.
function moduleGroups(graph) {
  return graph.memoize("moduleGroups", () => {
    const layers = layersOf(graph);
    const blocks = blocksOf(graph.spans, (span) => layers.get(span.node.id)).map((block) => ({
      layer: block.layer,
      start: block.items[0].start,
      end: block.items[block.items.length - 1].end,
      compute: block.items.reduce((sum, span) => sum + span.end - span.start, 0),
      exposed: 0,
      at: block.items[block.items.length - 1].at,
    }));
    for (const { stalls } of graph.collectives)
      for (const stall of stalls) {
        const place = graph.index.get(stall.at);
        const block = blocks.find((each) => each.at >= place) || blocks[blocks.length - 1];
        if (block) block.exposed += stall.end - stall.start;
      }
    return groupsOf(blocks).map((group) => ({
      ...group,
      start: group.blocks[0].start,
      end: group.blocks[group.blocks.length - 1].end,
    }));
  });
}

// Above the stream of compute: which module each stretch of it computes. Layers that are too
// narrow for their names share one name, with their number.
function paintModules(pen, x, view, graph) {
  pen.textAlign = "left";
  let painted = 0;
  for (const { name, blocks, start, end } of moduleGroups(graph)) {
    const together = blocks.length > 1 && (x(end) - x(start)) / blocks.length < LEAST_LABEL;
    const stretches = together
      ? [{ start, end, texts: shortNames(name).map((each) => `${each} × ${countText(blocks.length)}`) }]
      : blocks.map((block) => ({ ...block, texts: shortNames(block.layer) }));
    for (const stretch of stretches) paintStretch(pen, x, view, stretch, painted++ % 2);
  }
}

function paintStretch(pen, x, view, { start, end, texts }, odd) {
  if (!texts[0] || end < view.from || start > view.to) return;
  const from = Math.max(x(start), TRACK.left),
    to = x(end);
  pen.fillStyle = themeColor(odd ? "raised" : "line");
  pen.fillRect(from, TRACK.top - TRACK.modules - 2, Math.max(to - from, 1), TRACK.modules);
  if (to - from < LEAST_LABEL) return;
  pen.fillStyle = themeColor("text");
  const room = Math.min(to, x(view.to)) - from - 6;
  pen.fillText(fittingText(pen, texts, room), from + 4, TRACK.top - 2 - TRACK.modules / 2);
}

// The stretch of one layer at a time, or null.
function moduleAt(graph, time) {
  for (const { blocks } of moduleGroups(graph))
    for (const block of blocks) if (block.start <= time && time <= block.end) return { block };
  return null;
}

function blockTooltip({ layer, compute, exposed }) {
  return [
    el("b", {}, wrapping(layer || "(no module)")),
    el("p", {}, `${timeText(compute)} of compute, ${timeText(exposed)} exposed`),
  ];
}

const MODULE_COLUMNS = [
  ["module", "Stretches of compute, in their order. Equal layers are one row"],
  ["times", "Number of layers"],
  ["compute", "Estimated time of the kernels of all layers"],
  ["each", "Compute of one layer, from the least to the most"],
  ["exposed", "Estimated time for which these layers wait for communication"],
  ["each", "Exposed time of one layer, from the least to the most"],
  ["not as the others", "Layers whose compute differs from the median by more than 5 %"],
];

// Times by module. A click on a name shows its stretch of time.
function moduleTimes(graph, showTimes) {
  const sum = (blocks, key) => blocks.reduce((total, block) => total + block[key], 0);
  const rows = moduleGroups(graph).map((group) => {
    const { name, blocks } = group;
    const compute = (block) => block.compute;
    const odd = blocks.length > 1 ? oddOnes(blocks, compute) : [];
    const exposed = sum(blocks, "exposed");
    return el(
      "tr",
      {},
      el(
        "td",
        {},
        button(
          blocks.length > 1 ? name : blocks[0].layer || "(no module)",
          () => showTimes(group.start, group.end),
          { class: "link", title: "Show this stretch of time" },
        ),
      ),
      [
        countText(blocks.length),
        timeText(sum(blocks, "compute")),
        rangeText(blocks, compute, timeText),
      ].map((text) => el("td", { class: "right" }, text)),
      el("td", { class: exposed ? "right exposed-text" : "right" }, timeText(exposed)),
      el("td", { class: "right" }, rangeText(blocks, (block) => block.exposed, timeText)),
      el(
        "td",
        {},
        odd.length < blocks.length
          ? someOf(
              odd.map((block) => block.layer),
              3,
            )
          : "",
      ),
    );
  });
  if (!rows.length) return null;
  return el(
    "section",
    { class: "card by-module" },
    el("header", {}, el("h2", {}, "By module")),
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        { class: "compact" },
        tableHead(MODULE_COLUMNS, (at) => at > 0 && at < 6),
        el("tbody", {}, rows),
      ),
    ),
  );
}
