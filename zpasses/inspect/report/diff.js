// A pass, side by side: the graph before it and after it, the same node in one row where it kept its place.

const CONTEXT = 3;
let wholeGraph = false;
const openGaps = new Set();

function drawDiff(main) {
  const step = current.step, after = current.graph, before = current.before;
  if (!after) return put(main, notWritten());
  if (!step.after) return put(main, el("p", { class: "muted pad" }, "This is the graph as it came to this level. Choose a pass on the left to see what it changed."));
  if (!current.changed || !before) return put(main, runLine(step), el("p", { class: "muted pad" }, `${step.after} changed nothing in this graph.`));
  if (!after.changes.size) return put(main, runLine(step), el("p", { class: "muted pad" }, `${step.after} changed no node: it left marks, such as what backward computes again.`));
  const rows = folded(sideBySide(before, after));
  const list = rowList({
    label: `Nodes before and after ${step.after}`,
    row: (at) => diffRow(before, after, rows[at]),
    pick: (at) => {
      const item = rows[at];
      if (item.gap) { openGaps.add(item.key); redraw(); } else go({ node: (item.after || item.before).id });
    },
  });
  const jump = (direction) => {
    const changed = rows.map((item, at) => [item, at]).filter(([item]) => !item.gap && item.kinds.length);
    const from = list.active;
    const next = direction > 0 ? changed.find(([, at]) => at > from) : changed.reverse().find(([, at]) => at < from);
    if (next) { list.fill(rows.length, next[1]); list.element.focus(); }
  };
  put(main,
    runLine(step),
    el("div", { class: "bar" },
      changeChips(step.diff, true),
      el("span", { class: "stretch" }),
      button("↑ change", () => jump(-1), { title: "Previous changed node" }),
      button("↓ change", () => jump(1), { title: "Next changed node" }),
      el("label", {}, el("input", { type: "checkbox", checked: wholeGraph, onchange: (event) => { wholeGraph = event.target.checked; redraw(); } }), " whole graph")),
    el("div", { class: "diff-head", "aria-hidden": true }, el("span", {}, "before"), el("span", {}, `after ${step.after}`)),
    list.element);
  list.fill(rows.length, rows.findIndex((item) => !item.gap && state.node !== null && (item.after || item.before).id === state.node));
}

function runLine(step) {
  const run = step.run;
  if (!run) return null;
  const before = current.before, after = current.graph;
  return el("div", { class: "runline" },
    el("h2", {}, run.text),
    el("span", {}, `${plural(run.changes, "change")} in ${timeText(run.time_us)}, checked in ${timeText(run.check_us)}`),
    before && before !== after && el("span", {}, `peak ${bytesText(before.step.peak[0])} → ${bytesText(after.step.peak[0])} `, delta(before.step.peak[0], after.step.peak[0])),
    before && before !== after && el("span", {}, `exposed ${timeText(before.step.schedule.exposed)} → ${timeText(after.step.schedule.exposed)} `, delta(before.step.schedule.exposed, after.step.schedule.exposed)),
    el("span", { class: "muted" }, `checks: ${run.checks.join(", ") || "none"}`),
    run.notes.map((note) => el("p", {}, note)));
}

// Rows {before, after, kinds}: nodes that kept their place side by side, between them what went and what came.
function sideBySide(before, after) {
  const moved = new Set((after.step.diff.moved || []).map(([id]) => id));
  const kinds = (id) => (after.changes.get(id) || []).map(([kind]) => kind);
  const rows = [];
  let at = 0;
  const flush = (left, right) => {
    for (let i = 0; i < Math.max(left.length, right.length); i++) {
      const one = left[i], other = right[i];
      rows.push({ before: one, after: other, kinds: [...new Set([...(one ? kinds(one.id) : []), ...(other ? kinds(other.id) : [])])] });
    }
  };
  let right = [];
  for (const form of after.nodes) {
    if (!before.index.has(form.id) || moved.has(form.id)) { right.push(form); continue; }
    const left = [];
    while (at < before.nodes.length && before.nodes[at].id !== form.id) left.push(before.nodes[at++]);
    flush(left, right);
    right = [];
    rows.push({ before: before.nodes[at++], after: form, kinds: kinds(form.id), anchor: true });
  }
  flush(before.nodes.slice(at), right);
  return rows;
}

// Long stretches of unchanged rows become one row that opens them.
function folded(rows) {
  if (wholeGraph) return rows;
  const near = new Uint8Array(rows.length);
  rows.forEach((item, at) => {
    if (item.kinds.length || !item.anchor || (item.after && item.after.id === state.node)) {
      for (let i = Math.max(0, at - CONTEXT); i <= Math.min(rows.length - 1, at + CONTEXT); i++) near[i] = 1;
    }
  });
  const shown = [];
  for (let at = 0; at < rows.length;) {
    if (near[at]) { shown.push(rows[at++]); continue; }
    let end = at;
    while (end < rows.length && !near[end]) end++;
    const key = `${state.compile}/${state.graph}/${state.step}/${rows[at].after.id}`;
    if (end - at < 3 || openGaps.has(key)) shown.push(...rows.slice(at, end));
    else shown.push({ gap: end - at, key });
    at = end;
  }
  return shown;
}

function diffRow(before, after, item) {
  if (item.gap) return el("div", { class: "gap" }, `⋯ ${plural(item.gap, "node")} as before`);
  const { before: one, after: other } = item;
  return el("div", { class: "pair" }, diffCell(before, one, after, other, "before"), diffCell(after, other, after, one, "after"));
}

function diffCell(graph, form, after, twin, side) {
  if (!form) return el("div", { class: "cell none" });
  const kinds = (after.changes.get(form.id) || []).map(([kind]) => kind);
  const details = (after.changes.get(form.id) || []).map(([kind, detail]) => `${kind}: ${detail}`).join("\n");
  return el("div", { class: `cell ${side} ${kinds[0] || ""} ${twin ? "" : "alone"}`, title: details || form.note },
    el("span", { class: "number" }, graph.index.get(form.id) + 1),
    el("span", { class: "sign", "aria-label": kinds.join(", ") }, kinds.map((kind) => SIGNS[kind]).join("")),
    codeParts(form));
}
