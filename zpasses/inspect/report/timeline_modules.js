// What the timeline says about modules: the names above the stream of compute, and the table of
// times. Equal layers that follow each other are one group.

const LEAST_LABEL = 24; // Pixels below which a layer has no label of its own.

// [{name, blocks: [{layer, start, end, compute, exposed, at}], start, end}], in the order of time.
// Compute waits at the start of a block, so the wait counts for the block that it delays.
function moduleGroups(graph) {
  return graph.memoize("moduleGroups", () => {
    const layers = layersOf(graph);
    const blocks = blocksOf(graph.spans, (each) => layers.get(each.node.id)).map((block) => ({
      layer: block.layer,
      start: block.items[0].start,
      end: block.items.at(-1).end,
      compute: sumOf(block.items, (each) => each.end - each.start),
      exposed: 0,
      at: block.items.at(-1).at,
    }));
    for (const stall of graph.collectives.flatMap((each) => each.stalls)) {
      const place = graph.index.get(stall.at);
      const block = blocks.find((each) => each.at >= place) || blocks.at(-1);
      if (block) block.exposed += stall.end - stall.start;
    }
    return groupsOf(blocks).map((group) => ({
      ...group,
      start: group.blocks[0].start,
      end: group.blocks.at(-1).end,
    }));
  });
}

// Above the stream of compute: which module each stretch of it computes. Layers that are too
// narrow for their names share one name, with their number.
function paintModules(pen, x, view, graph) {
  let painted = 0;
  for (const { name, blocks, start, end } of moduleGroups(graph)) {
    const together = blocks.length > 1 && (x(end) - x(start)) / blocks.length < LEAST_LABEL;
    const times = ` × ${countText(blocks.length)}`;
    const stretches = together
      ? [{ start, end, texts: shortNames(name).map((each) => each + times) }]
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
  writes(pen, "left", "middle", themeColor("text"));
  const room = Math.min(to, x(view.to)) - from - 6;
  pen.fillText(fittingText(pen, texts, room), from + 4, TRACK.top - 2 - TRACK.modules / 2);
}

// The stretch of one layer at a time, or null.
function moduleAt(graph, time) {
  const blocks = moduleGroups(graph).flatMap((group) => group.blocks);
  const block = blocks.find((each) => each.start <= time && time <= each.end);
  return block ? { block } : null;
}

function blockTooltip({ layer, compute, exposed }) {
  return [
    el("b", {}, wrapping(layer || "(no module)")),
    el("p", {}, `${timeText(compute)} of compute, ${timeText(exposed)} exposed`),
  ];
}

const MODULE_COLUMNS = [
  ["module", "Stretches of compute, in their order. Equal layers are one row"],
  ["times", "Number of layers", "right"],
  ["compute", "Estimated time of the kernels of all layers", "right"],
  ["each", "Compute of one layer, from the least to the most", "right"],
  ["exposed", "Estimated time for which these layers wait for communication", "right"],
  ["each", "Exposed time of one layer, from the least to the most", "right"],
  ["not as the others", "Layers whose compute differs from the median by more than 5 %"],
];

// Times by module. A click on a name shows its stretch of time.
function moduleTimes(graph, showTimes) {
  const compute = (block) => block.compute,
    exposed = (block) => block.exposed;
  const rows = moduleGroups(graph).map(({ name, blocks, start, end }) => {
    const waited = sumOf(blocks, exposed);
    const title = blocks.length > 1 ? name : blocks[0].layer || "(no module)";
    return [
      linkButton(title, () => showTimes(start, end), { title: "Show this stretch of time" }),
      countText(blocks.length),
      timeText(sumOf(blocks, compute)),
      rangeText(blocks, compute, timeText),
      el("td", { class: waited ? "right exposed-text" : "right" }, timeText(waited)),
      rangeText(blocks, exposed, timeText),
      oddText(blocks, compute, (block) => block.layer),
    ];
  });
  return rows.length ? card("By module", "by-module", null, table(MODULE_COLUMNS, rows)) : null;
}
