// The page's state: compile, graph, step, tab and node. It is stored in the address, so that links
// and the browser's Back button work.

const TABS = ["overview", "diff", "memory", "timeline", "collectives", "listing", "source"];
const state = { compile: 0, graph: "", step: 0, tab: "overview", node: null };
const listeners = [];

function go(changes) {
  const next = { ...state, ...changes };
  normalise(next, "step" in changes);
  const before = { ...state };
  Object.assign(state, next);
  const { compile, graph, step, tab, node } = state;
  const hash = `#${[compile, encodeURIComponent(graph), step, tab, node ?? ""].join("/")}`;
  if (location.hash !== hash) history.pushState(null, "", hash);
  for (const listener of listeners) listener(before);
}

function normalise(next, stepGiven) {
  const compile = compiles[next.compile] || compiles[0];
  if (!compile || !compile.graphs.length) return;
  next.compile = compiles.indexOf(compile);
  const graph =
    compile.graphs.find((each) => each.name === next.graph) ||
    compile.executed[0] ||
    compile.graphs[0];
  if (graph.name !== next.graph && !stepGiven) next.step = compile.last(graph);
  next.graph = graph.name;
  if (!(next.step >= 0 && next.step < graph.steps.length)) next.step = compile.last(graph);
  if (!TABS.includes(next.tab)) next.tab = "overview";
}

function fromAddress() {
  const [compile, graph, step, tab, node] = location.hash.slice(1).split("/");
  const known = compile !== undefined && compile !== "";
  let name = "";
  try {
    name = known ? decodeURIComponent(graph || "") : "";
  } catch {
    name = "";
  }
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
