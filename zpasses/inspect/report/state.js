// The page's state: compile, graph, step, tab and node, and how the tab's list is filtered and
// sorted. It is stored in the address, so that links and the browser's Back button work.

const TABS = ["overview", "diff", "memory", "timeline", "collectives", "listing", "source", "compare"];
const state = { compile: 0, graph: "", step: 0, tab: "overview", node: null, view: {} };
const listeners = [];
let notice = ""; // What the address asks for and the dump does not have.

function go(changes) {
  const next = { ...state, ...changes };
  notice = "";
  normalise(next, "step" in changes);
  const before = { ...state };
  Object.assign(state, next);
  if (location.hash !== address()) history.pushState(null, "", address());
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
  if (!TABS.includes(next.tab)) {
    if (next.tab) notice = `There is no view "${next.tab}".`;
    next.tab = "overview";
  }
  const shown = next.node !== null && compile.at(graph, next.step);
  const earlier = shown && compile.before(graph, next.step);
  if (shown && !shown.node(next.node) && !(earlier && earlier.node(next.node))) {
    if (state.node !== next.node) notice = `This graph has no node with the id ${next.node}.`;
  }
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
  state.view = Object.fromEntries(new URLSearchParams(view || ""));
  go(
    known
      ? { compile: +compile || 0, graph: name, step: +step || 0, tab, node: node ? +node : null }
      : {},
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
