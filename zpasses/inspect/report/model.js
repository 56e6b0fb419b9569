// The dump as `payload.py` writes it. Graphs and nodes are built on first use.

const KINDS = ["parameter", "bucket", "gradient", "activation", "scratch", "other"];
const SIGNS = {
  inserted: "+",
  removed: "−",
  moved: "↕",
  rewired: "~",
  retagged: "#",
  "recompute-changed": "*",
  retyped: ":",
  renamed: "=",
};
const CHANGES = Object.keys(SIGNS);
const signs = (kinds) => kinds.map((kind) => SIGNS[kind]).join("");
const EXECUTED = ["forward", "inference", "backward"];

// Graphs in the order of their interest: those that run, then those that they are made from.
function byInterest(graphs) {
  const rank = ({ name }) => (EXECUTED.includes(name) ? 0 : { joint: 2, captured: 3 }[name] || 1);
  return [...graphs].sort((a, b) => rank(a) - rank(b));
}

// Returns the list under a key and creates it first if needed.
function listIn(map, key) {
  if (!map.has(key)) map.set(key, []);
  return map.get(key);
}

class GraphNode {
  // A node in one state. Steps share the object of a node that does not change between them.
  // `shared` returns the tag, source or collective of a number, made once for all nodes.
  constructor(row, text, shared) {
    const [id, name, op, target, code, note, values, nbytes, params, tag, ...rest] = row;
    const [source, cost, inputs, buffers, collective, mark] = rest;
    Object.assign(this, { id, nbytes, cost, inputs });
    this.name = text[name];
    this.op = text[op];
    this.target = text[target];
    this.code = this.op === "output" ? text[code] : this.name + text[code];
    this.note = text[note];
    this.values = text[values];
    this.params = params.map((at) => text[at]);
    this.tag = shared(tag, ([role, bucket, origin, flags, nbytes, note]) => ({
      role: text[role],
      bucket,
      origin: text[origin],
      flags: text[flags],
      nbytes,
      note: text[note],
    }));
    this.source = shared(source, ([file, line, code, module]) => ({
      file: text[file],
      line,
      text: text[code],
      module: text[module],
    }));
    this.buffers = buffers.map(([size, first, last, kind, owners]) => ({
      nbytes: size,
      first,
      last,
      kind: text[kind],
      params: owners.map((at) => text[at]),
      node: this,
    }));
    this.mark = mark === null ? "" : text[mark];
    this.collective = shared(collective, ([kind, group, ranks, size, full, route, decision]) => ({
      kind: text[kind],
      group: text[group],
      ranks,
      nbytes: size,
      full,
      route: text[route],
      decision: text[decision],
    }));
  }

  get waits() {
    return this.target.includes("wait_tensor");
  }
}

class Graph {
  // A graph at one step, with its nodes in execution order.
  constructor(compile, step) {
    this.compile = compile;
    this.step = step;
    this.nodes = [];
    for (const [first, count] of step.order)
      for (let at = first; at < first + count; at++) this.nodes.push(compile.node(at));
    this.index = new Map(this.nodes.map((node, at) => [node.id, at]));
    this.memo = {};
  }

  memoize(name, make) {
    if (!(name in this.memo)) this.memo[name] = make();
    return this.memo[name];
  }

  node(id) {
    return this.nodes[this.index.get(id)];
  }

  get users() {
    return this.memoize("users", () => {
      const found = new Map();
      for (const node of this.nodes)
        for (const read of node.inputs) listIn(found, read).push(node.id);
      return found;
    });
  }

  get buffers() {
    return this.memoize("buffers", () =>
      this.nodes.flatMap((node) =>
        node.buffers.map((buffer) => ({
          ...buffer,
          from: this.index.get(buffer.first),
          to: this.index.get(buffer.last),
        })),
      ),
    );
  }

  get curves() {
    // Bytes alive while each node runs: in total and by kind.
    return this.memoize("curves", () => {
      const size = this.nodes.length;
      const byKind = {};
      const live = new Float64Array(size + 1);
      for (const { nbytes, kind, from, to } of this.buffers) {
        if (!nbytes) continue;
        byKind[kind] ||= new Float64Array(size + 1);
        for (const curve of [byKind[kind], live]) {
          curve[from] += nbytes;
          curve[to + 1] -= nbytes;
        }
      }
      for (const curve of [live, ...Object.values(byKind)])
        for (let at = 1; at <= size; at++) curve[at] += curve[at - 1];
      const kinds = [
        ...KINDS.filter((kind) => byKind[kind]),
        ...Object.keys(byKind).filter((kind) => !KINDS.includes(kind)),
      ];
      let peak = 0;
      for (let at = 1; at < size; at++) if (live[at] > live[peak]) peak = at;
      return { live, byKind, kinds, peak };
    });
  }

  alive(at) {
    return this.buffers
      .filter((buffer) => buffer.from <= at && at <= buffer.to && buffer.nbytes)
      .sort((a, b) => b.nbytes - a.nbytes);
  }

  get collectives() {
    return this.memoize("collectives", () =>
      this.step.schedule.collectives.map(
        ([id, start, end, wait, distance, compute, stalls], at) => ({
          id,
          node: this.node(id),
          of: this.node(id).collective,
          start,
          end,
          time: end - start,
          wait,
          distance,
          compute,
          number: at,
          measured: this.step.measured && this.step.measured.collectives[id],
          stalls: stalls.map(([where, from, to]) => ({ at: where, start: from, end: to })),
          exposed: sumOf(stalls, ([, from, to]) => to - from),
          // The part of it before the transfer starts, behind earlier collectives of the group.
          queued: sumOf(stalls, ([, from, to]) => Math.max(0, Math.min(to, start) - from)),
        }),
      ),
    );
  }

  get spans() {
    // When each computing node runs.
    return this.memoize("spans", () => {
      const odd = new Map(this.step.schedule.odd_spans.map(([at, ...times]) => [at, times])),
        spans = [];
      let now = 0;
      this.nodes.forEach((node, at) => {
        if (!(node.cost > 0) || node.collective) return;
        const [gap, length] = odd.get(spans.length) || [0, node.cost];
        const start = now + gap;
        now = start + length;
        spans.push({ node, at, start, end: now });
      });
      return spans;
    });
  }

  // Ids of the nodes that the step's pass moved.
  get moved() {
    return new Set(((this.step.diff || {}).moved || []).map(([id]) => id));
  }

  get changes() {
    // Id -> [kind, detail] of each change by the step's pass.
    return this.memoize("changes", () => {
      const found = new Map();
      for (const kind of CHANGES) {
        for (const [id, detail] of (this.step.diff || {})[kind] || [])
          listIn(found, id).push([kind, detail]);
      }
      return found;
    });
  }
}

class Compile {
  constructor(data) {
    Object.assign(this, data);
    this.parsedNodes = [];
    this.sharedObjects = [];
    this.builtGraphs = new Map();
  }

  node(at) {
    this.parsedNodes[at] ||= new GraphNode(this.nodes[at], this.strings, (number, make) =>
      number === null ? null : (this.sharedObjects[number] ||= make(this.shared[number])),
    );
    return this.parsedNodes[at];
  }

  graphData(name) {
    return this.graphs.find((graph) => graph.name === name) || this.graphs[0];
  }

  // The step that stores the graph of a step: an earlier one if the pass changed nothing.
  stepWithGraph(graph, index) {
    const step = graph.steps[index];
    return step.same === undefined ? step : graph.steps[step.same];
  }

  at(graph, index) {
    const step = this.stepWithGraph(graph, index);
    if (!step.order) return null;
    const key = `${graph.name}\n${step.index}`;
    if (!this.builtGraphs.has(key)) this.builtGraphs.set(key, new Graph(this, step));
    return this.builtGraphs.get(key);
  }

  before(graph, index) {
    for (let at = index - 1; at >= 0; at--)
      if (this.stepWithGraph(graph, at).order) return this.at(graph, at);
    return null;
  }

  last(graph) {
    for (let at = graph.steps.length - 1; at > 0; at--)
      if (this.stepWithGraph(graph, at).order && !graph.steps[at].error) return at;
    return 0;
  }

  get executed() {
    const written = this.graphs.filter((graph) => graph.steps.some((step) => step.order));
    const found = written.filter((graph) => EXECUTED.includes(graph.name));
    return found.length ? found : written.slice(-1);
  }
}

const report = JSON.parse(document.getElementById("data").textContent);
const compiles = report.compiles.map((data) => new Compile(data));
