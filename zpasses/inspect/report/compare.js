// Any two graphs side by side: of one compile, of two compiles, of two ranks, or of two dumps.

// What the shown graph is compared with: {compile, data, step, graph, why}, or null if there is
// nothing. `why` says why the page took a step that is not after the same pass.
function otherSide() {
  const [compile, name, step] = (state.view.with || "").split("/");
  const chosen = compiles[+compile];
  const data = chosen && name && chosen.graphs.find((each) => each.name === name);
  if (data && step === SAME_PASS) return sideOfCounterpart(chosen, data);
  if (data && data.steps[+step]) return sideOf(chosen, data, +step);
  const found = likeliestSide();
  if (!found || !state.view.with) return found;
  const lost = `This page has no graph "${state.view.with}" to compare with, so it shows another. `;
  return { ...found, why: lost + (found.why || "") };
}

function likeliestSide() {
  const others = compiles
    .filter((each) => each !== current.compile)
    .sort((a, b) => closeness(b) - closeness(a));
  for (const each of others) {
    const same = each.graphs.find((graph) => graph.name === state.graph);
    if (same) return sideOfCounterpart(each, same);
  }
  const first = current.data.steps.findIndex((each) => each.order);
  const last = current.compile.last(current.data);
  if (first < 0) return null;
  return sideOf(current.compile, current.data, state.step === first ? last : first);
}

const SAME_PASS = "same"; // in the address, the step that follows the shown one from pass to pass

function sideOfCounterpart(compile, data) {
  const { step, why } = counterpart(current.data, state.step, compile, data);
  return { ...sideOf(compile, data, step), why };
}

// Another dump is the likeliest to compare with, then another rank.
function closeness(compile) {
  const here = current.compile;
  return (
    4 * (compile.dump !== here.dump) +
    2 * (compile.rank !== here.rank) +
    (compile.name === here.name)
  );
}

// The two sides. Of one graph, the earlier step is on the left, so that what passes added is new;
// otherwise the shown graph is. "Swap" exchanges them.
function sidesOfComparison() {
  const shown = sideOf(current.compile, current.data, state.step),
    other = otherSide();
  const isLater = Boolean(
    other && other.compile === shown.compile && other.data === shown.data && other.step < shown.step,
  );
  const onRight = Boolean(other) && isLater !== (state.view.swap === "1");
  return { shown, other, left: onRight ? other : shown, right: onRight ? shown : other };
}

function sideOf(compile, data, step) {
  return { compile, data, step, graph: compile.at(data, step) };
}

// Shows Compare with the graph of an address.
function compareWith(address, shown) {
  state.view = { ...state.view, with: address, other: "", swap: "" };
  go({ ...shown, tab: "compare", node: null });
}

function sideName({ compile, data, step }) {
  const where = compiles.length > 1 ? `${compileName(compile)} ` : "";
  return `${where}${data.name}, ${stepName(data.steps[step])}`;
}

function drawCompare(main) {
  const { shown, other, left, right } = sidesOfComparison();
  put(
    main,
    sideChooser(shown, other, left, right),
    other && other.why && el("p", { class: "notice", role: "status" }, other.why),
  );
  if (!shown.graph) return put(main, notWritten());
  if (!other || !other.graph)
    return put(main, remark("There is no second graph. Choose one, or add a report."));
  const { pairs, rows } = compared(left.graph, right.graph);
  put(
    main,
    left.compile !== right.compile && stepTotals(left.compile, right.compile),
    isModelled(current.step) && graphFigures(left, right, pairs),
  );
  drawSides(main, left, right, rows, left === shown ? "before" : "after");
}

function sideChooser(shown, other, left, right) {
  const sides = [el("b", {}, sideName(shown)), otherChoice(other)];
  const [first, second] = left === shown ? sides : sides.reverse();
  const swap = () => keepAndRedraw({ swap: state.view.swap === "1" ? "" : "1" });
  return bar(
    first,
    right ? "→" : "with",
    second,
    right && button("Swap", swap, { title: "Exchange the two sides" }),
    stretchSpace(),
    addReportField(),
  );
}

function keepAndRedraw(changes) {
  keep(changes);
  redraw();
}

function otherChoice(right) {
  const follows = right && "why" in right;
  const options = (compile, at) => (graph) => {
    const address = (step) => `${at}/${graph.name}/${step}`;
    const isSide = right && right.compile === compile && right.data === graph;
    const step = (each, index) => {
      const name = sideName({ compile, data: graph, step: index });
      return option(address(index), isSide && !follows && right.step === index, name);
    };
    const same = compile !== current.compile && graph.name === state.graph;
    const name = () => `${sideName(sideOfCounterpart(compile, graph))} (follows the shown pass)`;
    const counterpart = same && option(address(SAME_PASS), isSide && follows, name());
    return [counterpart, ...graph.steps.map(step)];
  };
  const groups = compiles.map((compile, at) =>
    el(
      "optgroup",
      { label: compileName(compile) },
      byInterest(compile.graphs).flatMap(options(compile, at)),
    ),
  );
  const show = (address) => keepAndRedraw({ with: address, other: "", swap: "" });
  return choice("Compare with", [!right && option("", false, "choose a graph"), ...groups], show);
}

const FIGURES = [
  ["time", (step) => step.schedule.total, timeText],
  ["exposed", (step) => step.schedule.exposed, timeText],
  ["peak", (step) => step.peak[0], bytesText],
  ["collectives", (step) => step.schedule.launches, countText],
];

// The whole step: all graphs that run, of both compiles. A compile that failed lacks some of them, so
// its sums are no step.
function stepTotals(one, other) {
  const names = (compile) => compile.executed.map((graph) => graph.name).join(" + ");
  if (names(one) !== names(other)) return null;
  const figure = (name, pick) => (compile) => {
    const last = (graph) => compile.stepWithGraph(graph, compile.last(graph));
    const found = compile.executed.map(last).filter((step) => step.order).map(pick);
    return name === "peak" ? Math.max(0, ...found) : sumOf(found, (value) => value);
  };
  const both = [one, other];
  const failed = both.filter((compile) => compile.error);
  const where = failed.length && failed[0].error.where ? ` in ${failed[0].error.where}` : "";
  return figureTable(
    `${failed.length ? "Part of a step" : "Whole step"}: ${names(one)}`,
    FIGURES.map(([name, pick, text]) => [name, ...both.map(figure(name, pick)), text]),
    both.map(compileName),
    failed.length > 0 &&
      el(
        "p",
        { class: "failed-part" },
        `${failed.map(compileName).join(" and ")} failed${where}, so other graphs of the step may ` +
          "be missing.",
      ),
  );
}

function graphFigures(left, right, pairs) {
  const graphs = [left.graph, right.graph];
  const rows = FIGURES.map(([name, pick, text]) => [
    name,
    ...graphs.map((graph) => pick(graph.step)),
    text,
  ]);
  rows.push(["nodes", ...graphs.map((graph) => graph.nodes.length), countText]);
  const most = Math.max(...graphs.map((graph) => graph.step.peak[0]));
  const curve = (side) =>
    el("figure", {}, sparkline(side.graph, most, 320, 48), el("figcaption", {}, sideName(side)));
  return figureTable(
    "These two graphs",
    rows,
    [left, right].map(sideName),
    el("div", { class: "two-curves" }, [left, right].map(curve)),
    peakDelta(left, right, pairs),
  );
}

function figureTable(title, rows, names, ...more) {
  const columns = [
    ["figure", "Figures of the cost model"],
    ...names.map((name) => [name, name, "right"]),
    ["change", "From the first to the second, relative to the first", "right"],
  ];
  const lines = rows.map(([name, one, other, text]) => [
    el("th", { scope: "row" }, name),
    text(one),
    text(other),
    one === other ? "=" : delta(one, other) || "≈",
  ]);
  return card(title, "compared", null, table(columns, lines, ""), more);
}

// As `_counterparts` of comparison.py: buffers of the same node, kind and parameter; else of the same
// kind for the same parameter; else of the same node and kind, if one of them has no parameter.
function counterparts(own, others) {
  const found = new Map([...own.keys()].filter((key) => others.has(key)).map((key) => [key, key]));
  const pair = (group, alike) => {
    const taken = new Set(found.values()),
      left = new Map();
    for (const key of others.keys()) {
      const name = group(...key.split("/"));
      if (taken.has(key) || !name) continue;
      listIn(left, name).push(key);
    }
    for (const key of own.keys()) {
      const name = found.has(key) ? "" : group(...key.split("/"));
      const free = (name && left.get(name)) || [];
      const at = free.findIndex((each) => alike(key.split("/")[2], each.split("/")[2]));
      if (at >= 0) found.set(key, free.splice(at, 1)[0]);
    }
  };
  pair((_, kind, param) => param && `${kind}/${param}`, () => true);
  pair((number, kind) => `${number}/${kind}`, (mine, other) => !(mine && other));
  return found;
}

// What is alive at one peak and not at the other, as `zpasses/inspect/comparison.py` tells it.
function peakDelta(left, right, pairs) {
  // As `_held` of comparison.py. Of buffers that differ in size, the difference is new or gone.
  const held = (graph, known) => {
    const found = new Map(),
      counts = new Map();
    for (const buffer of graph.alive(graph.curves.peak)) {
      const id = buffer.node.id,
        param = buffer.params.length === 1 ? buffer.params[0] : "",
        key = `${known ? known.get(id) ?? -1 - id : id}/${buffer.kind}/${param}`,
        count = counts.get(key) ?? 0;
      counts.set(key, count + 1);
      found.set(`${key}/${count}`, buffer);
    }
    return found;
  };
  const one = held(left.graph, pairs),
    other = held(right.graph, null);
  const same = counterparts(one, other);
  const inverse = new Map([...same].map(([key, counterpart]) => [counterpart, key]));
  const only = (own, others, known) => {
    const found = [];
    for (const [key, buffer] of own) {
      const more = buffer.nbytes - (known.has(key) ? others.get(known.get(key)).nbytes : 0);
      if (more > 0) found.push({ ...buffer, nbytes: more });
    }
    return found.sort((first, second) => second.nbytes - first.nbytes);
  };
  const list = (title, buffers, sense) =>
    el(
      "div",
      {},
      el(
        "h3",
        {},
        `${title}: `,
        span(`delta ${sense}`, bytesText(sumOf(buffers, (each) => each.nbytes))),
      ),
      buffers.slice(0, 8).map(({ node, kind, params, nbytes }) =>
        el(
          "p",
          { title: params.join("\n") },
          kindDot(kind),
          `${bytesText(nbytes)} ${kind} `,
          middleCut(params.length === 1 ? params[0] : node.name),
        ),
      ),
      buffers.length > 8 && muted(`and ${countText(buffers.length - 8)} more`),
    );
  return el(
    "div",
    { class: "peak-delta" },
    list("gone at the peak", only(one, other, same), "better"),
    list("new at the peak", only(other, one, inverse), "worse"),
  );
}

// Both graphs in one list. A selected row selects both nodes.
function drawSides(main, left, right, all, shown) {
  const list = pairList({
    label: "Nodes of both graphs",
    graphs: [left.graph, right.graph],
    all,
    names: ["first", "second"],
    unchanged: "equal",
    nodeOf: (item) => item[shown],
    about: (node, item, side) => {
      const { before, after } = item;
      const kinds = item[side === "before" ? "own" : "its"] || item.kinds;
      const retagged =
        before && after && item.kinds.includes("retagged")
          ? listChange("params", before.params, after.params)
          : "";
      const title = [kinds.join(", "), retagged, node.note].filter(Boolean).join("\n");
      return { kinds, title, change: side === "after" ? retagged : "" };
    },
    pick: (item) => {
      const own = item[shown];
      keep({ other: own ? "" : String((item.before || item.after).id) });
      go({ node: own ? own.id : null });
    },
  });
  const count = (kind) => all.filter((item) => item.counted.includes(kind)).length;
  put(
    main,
    bar(
      CHANGES.filter(count).map((kind) => countChip(kind, count(kind))),
      !all.some((item) => item.kinds.length) && "The two graphs are equal.",
      stretchSpace(),
      foldSwitch(list.count, redraw),
    ),
    sidesHead([sideName(left), sideName(right)], list.names),
    list.element,
  );
  list.fill();
}

// "params: 14 -> 15: with b.weight and 2 more, without a.weight", as difference.py tells it.
function listChange(name, was, now) {
  if (String(was) === String(now)) return "";
  const [old, fresh] = [new Set(was), new Set(now)];
  const some = (word, items) => items.length && `${word} ${someOf(items, 1)}`;
  const parts = [
    some("with", now.filter((item) => !old.has(item))),
    some("without", was.filter((item) => !fresh.has(item))),
  ];
  const change = parts.filter(Boolean).join(", ") || "in another order";
  return `${name}: ${countText(was.length)} -> ${countText(now.length)}: ${change}`;
}
