// Two graphs side by side in one list, so that they scroll in step. Diff and Compare show it. On a
// narrow page, the two sides stand below each other: what is before a change above what is after it,
// and an equal node once.

const CONTEXT = 3;
const openGaps = new Set();
const narrowPage = matchMedia("(max-width: 720px)");
narrowPage.addEventListener("change", () => {
  if (["diff", "compare"].includes(state.tab)) redraw();
});

const isChanged = (item) => !item.gap && item.kinds.length > 0;

// The list of both graphs.
//   all: rows {before, after, kinds, anchor}; a row with an anchor has a node that was not moved
//   names: what the sides are called on a narrow page
//   unchanged: what nodes are called that do not differ
//   nodeOf: the node of a row that the panel shows, if any
//   about: {kinds, title, change} of a node of a row
function pairList({ label, graphs, all, names, unchanged, nodeOf, about, pick }) {
  const [one, other] = graphs;
  const count = Math.max(one.nodes.length, other.nodes.length);
  const isShown = (item) => state.node !== null && nodeOf(item)?.id === state.node;
  const cell = (item, side) => {
    const node = item[side];
    if (!node) return el("div", { class: "cell none" });
    const graph = side === "before" ? one : other;
    const { kinds, title, change } = about(node, item, side);
    return el(
      "div",
      { class: `cell ${side} ${kinds[0] || ""}`, title },
      span("number", countText(graph.index.get(node.id) + 1)),
      el("span", { class: "sign", "aria-label": kinds.join(", ") }, signs(kinds)),
      codeParts(node, change),
    );
  };
  const row = (item) => {
    if (item.gap) return el("div", { class: "gap" }, `⋯ ${plural(item.gap, `${unchanged} node`)}`);
    if (!item.side) return el("div", { class: "pair" }, cell(item, "before"), cell(item, "after"));
    const name = item.equal ? "" : names[item.side === "before" ? 0 : 1];
    return el("div", { class: "pair single" }, span("side", name), cell(item, item.side));
  };
  const rowsNow = () =>
    shownRows(isFolded(count) ? foldPairs(one, other, all, isShown) : foldUnchanged(all));
  const foldedRow = (item) => foldRow(item, blockNodes, kindChips(item.blocks));
  return { ...foldingList({ label, rowsNow, foldedRow, row, pick, isShown }), count, names };
}

// Both graphs by layer. A node that only one side has stands with the layer that runs there. Within
// an open layer, unchanged stretches are folded too.
function foldPairs(one, other, all, isShown) {
  const [earlier, layers] = [layersOf(one), layersOf(other)];
  const layer = (item) => (item.after ? layers.get(item.after.id) : earlier.get(item.before.id));
  const shown = [];
  let items = [];
  const flush = () => {
    shown.push(...foldUnchanged(items));
    items = [];
  };
  for (const row of foldRows(all, layer, `${state.graph}/${state.step}/${state.tab}`, isShown)) {
    if (!row.fold) {
      items.push(row);
      continue;
    }
    flush();
    shown.push(row);
  }
  flush();
  return shown;
}

const blockNodes = (block) => block.items.map((item) => item.after || item.before);

// How many rows of each kind of change every layer of a fold has.
function kindChips(blocks) {
  const count = (kind) => (block) => block.items.filter((item) => item.kinds.includes(kind)).length;
  const found = CHANGES.filter((kind) => blocks.some(count(kind)));
  if (!found.length) return muted("unchanged");
  return found.map((kind) => {
    const text = `${SIGNS[kind]} ${rangeText(blocks, count(kind), countText)}`;
    return chip(kind, text, `${kind}, in each layer`);
  });
}

// Replaces each long run of unchanged rows by one row that expands it on a click.
function foldUnchanged(rows) {
  if (isWhole()) return rows;
  const near = new Uint8Array(rows.length);
  rows.forEach((item, at) => {
    if (item.kinds.length || !item.anchor || item.after?.id === state.node)
      near.fill(1, Math.max(0, at - CONTEXT), at + CONTEXT + 1);
  });
  const shown = [];
  for (let at = 0; at < rows.length;) {
    let end = at;
    while (end < rows.length && near[end] === near[at]) end++;
    const key = `${state.compile}/${state.graph}/${state.step}/${rows[at].after?.id}`;
    if (near[at] || end - at < 3 || openGaps.has(key)) shown.push(...rows.slice(at, end));
    else shown.push({ gap: end - at, key });
    at = end;
  }
  return shown;
}

// The rows as they are shown. On a narrow page, each row of two sides that differ becomes two, whose
// `side` says which of them it shows.
function shownRows(rows) {
  if (!narrowPage.matches) return rows;
  const shown = [];
  let after = [];
  const flush = () => {
    shown.push(...after);
    after = [];
  };
  for (const row of rows) {
    if (row.fold || row.gap || row.anchor) flush();
    if (row.fold || row.gap) shown.push(row);
    else if (row.anchor) {
      if (row.kinds.length) shown.push({ ...row, side: "before" });
      shown.push({ ...row, side: "after", equal: !row.kinds.length });
    } else {
      if (row.before) shown.push({ ...row, after: undefined, side: "before" });
      if (row.after) after.push({ ...row, before: undefined, side: "after" });
    }
  }
  flush();
  return shown;
}

// What stands above the columns, or what the names of the sides mean.
function sidesHead(titles, names) {
  const head = (title, at) => {
    const named = title.startsWith(names[at]) || !narrowPage.matches;
    return el("span", {}, named ? title : `${names[at]}: ${title}`);
  };
  return el("div", { class: "diff-head" }, titles.map(head));
}
