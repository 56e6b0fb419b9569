// The page's state: compile, graph, step, tab and node, and how the tab's list is filtered and
// sorted. It is stored in the address, so that links and the browser's Back button work.

const TABS = ["overview", "diff", "memory", "timeline", "collectives", "listing", "source", "compare"];
const ALIASES = { graph: "listing" }; // What the tab says.
const state = { compile: 0, graph: "", step: 0, tab: "overview", node: null, view: {} };
const listeners = [];
let notice = ""; // What the address asks for and the dump does not have.

// What of the view belongs to one graph, or to one node: the stretch of nodes that Memory shows, the
// stretch of time of Timeline, and the line of Source.
const OF_GRAPH = ["nodes", "time", "line"],
  OF_NODE = ["line"];

// Shows another place. `replace` writes its address over the one that the reader gave, so that Back
// leads away from it.
function go(changes, { view, said = "", replace = false } = {}) {
  const next = { ...state, ...changes };
  notice = said;
  normalise(next, "step" in changes);
  const before = { ...state };
  if (view) next.view = view;
  else if (next.compile !== state.compile || next.graph !== state.graph)
    next.view = without(state.view, OF_GRAPH);
  else if (next.node !== null && next.node !== state.node)
    next.view = without(state.view, OF_NODE);
  Object.assign(state, next);
  if (location.hash !== address())
    history[replace ? "replaceState" : "pushState"](null, "", address());
  for (const listener of listeners) listener(before);
}

function address() {
  const { compile, graph, step, tab, node } = state;
  const view = new URLSearchParams(
    Object.entries(state.view).filter(([, value]) => value),
  ).toString();
  const place = [compile, encodeURIComponent(graph), step, tab, node ?? ""].join("/");
  return `#${place}${view && `/${view}`}`;
}

// Filters, sorting and folds: {filter, kind, sort, ...} as texts. They are kept from tab to tab.
function keep(changes) {
  state.view = { ...state.view, ...changes };
  history.replaceState(null, "", address());
}

// The same for what changes with each turn of a wheel. Browsers limit how often an address changes.
let writingAddress = null;
function keepSoon(changes) {
  state.view = { ...state.view, ...changes };
  clearTimeout(writingAddress);
  writingAddress = setTimeout(() => history.replaceState(null, "", address()), 200);
}

function without(view, keys) {
  return Object.fromEntries(Object.entries(view).filter(([key]) => !keys.includes(key)));
}

// "12.5-80" -> [12.5, 80], if that is a stretch within `end`; else null.
function stretchOf(text, end) {
  const [from, to] = (text || "").split("-").map(Number);
  return from >= 0 && from < to && to <= end * (1 + 1e-6) ? [from, Math.min(to, end)] : null;
}

// The text of a stretch; "" for the whole.
function stretchText(from, to, end) {
  const digits = (value) => String(Number(value.toPrecision(7)));
  return from <= 0 && to >= end ? "" : `${digits(from)}-${digits(to)}`;
}

function normalise(next, stepGiven) {
  const compile = compiles[next.compile] || compiles[0];
  if (!compile || !compile.graphs.length) return;
  if (!compiles[next.compile]) notice = `This dump has no compile ${next.compile}.`;
  next.compile = compiles.indexOf(compile);
  const graph =
    compile.graphs.find((each) => each.name === next.graph) ||
    compile.executed[0] ||
    compile.graphs[0];
  if (graph.name !== next.graph) {
    if (next.graph)
      notice =
        `Compile ${compile.name} has no graph "${next.graph}"; this is ${graph.name}. ` +
        `It has ${compile.graphs.map((each) => each.name).join(", ")}.`;
    if (!stepGiven || next.graph) next.step = compile.last(graph);
  }
  next.graph = graph.name;
  if (!(next.step >= 0 && next.step < graph.steps.length)) {
    if (stepGiven)
      notice = `Graph ${graph.name} has no step ${next.step}; it has 0 to ${graph.steps.length - 1}.`;
    next.step = compile.last(graph);
  }
  const tab = (next.tab || "overview").toLowerCase();
  const known = ALIASES[tab] || tab;
  if (!TABS.includes(known))
    notice =
      `There is no view "${next.tab}"; there are ` +
      `${TABS.map((each) => titleOf(each).toLowerCase()).join(", ")}.`;
  next.tab = TABS.includes(known) ? known : "overview";
  const shown = next.node !== null && compile.at(graph, next.step);
  const earlier = shown && compile.before(graph, next.step);
  if (shown && !shown.node(next.node) && !(earlier && earlier.node(next.node))) {
    if (state.node !== next.node) notice = `This graph has no node with the id ${next.node}.`;
  }
}

// What the tab says.
function titleOf(tab) {
  const alias = Object.keys(ALIASES).find((each) => ALIASES[each] === tab) || tab;
  return alias[0].toUpperCase() + alias.slice(1);
}

function fromAddress() {
  const [compile, graph, step, tab, node, view] = location.hash.slice(1).split("/");
  const known = compile !== undefined && compile !== "";
  let name = "";
  try {
    name = known ? decodeURIComponent(graph || "") : "";
  } catch {
    name = graph;
  }
  const number = (text) => (/^\d+$/.test(text) ? +text : null);
  const strange = [compile, step, node].find((part) => part && number(part) === null);
  const said =
    known && strange !== undefined
      ? `The address "${location.hash}" names nothing that this page shows: "${strange}" is no ` +
        "number. Expected #COMPILE/GRAPH/STEP/VIEW/NODE."
      : "";
  go(
    known
      ? {
          compile: number(compile) ?? 0,
          graph: name,
          step: number(step || "0") ?? 0,
          tab,
          node: node ? number(node) : null,
        }
      : {},
    { view: Object.fromEntries(new URLSearchParams(view || "")), said, replace: true },
  );
}

const current = {
  get compile() {
    return compiles[state.compile];
  },
  get data() {
    return this.compile.graphData(state.graph);
  },
  get step() {
    return this.data.steps[state.step];
  },
  get graph() {
    return this.compile.at(this.data, state.step);
  },
  get before() {
    return this.compile.before(this.data, state.step);
  },
  get changed() {
    return this.step.same === undefined && Boolean(this.step.after);
  },
};

function stepName(step) {
  return step.after || "before the first pass";
}
