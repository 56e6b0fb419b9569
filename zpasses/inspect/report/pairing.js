// Which nodes of two graphs are the same. Within a compile, equal ids are. Nodes of two compiles,
// ranks or dumps are paired as `zpasses/inspect/pairing.py` does.

// Returns a map: id in `one` -> id in `other`.
function pairNodes(one, other) {
  const pairs = new Map();
  if (one.compile === other.compile) {
    for (const node of one.nodes) if (other.index.has(node.id)) pairs.set(node.id, node.id);
    return pairs;
  }
  const taken = new Set();
  const [left, right] = [expressions(one), expressions(other)];
  const pair = (a, b) => {
    pairs.set(a.id, b.id);
    taken.add(b.id);
  };
  const differ = differentParams(one, other);
  // Nodes whose key is null stay free.
  const match = (keyOf, onlyEqualCounts) => {
    const free = new Map(),
      open = new Map();
    for (const node of other.nodes) {
      const key = taken.has(node.id) ? null : keyOf(node, right);
      if (key !== null) listIn(free, key).push(node);
    }
    for (const node of one.nodes) {
      const key = pairs.has(node.id) ? null : keyOf(node, left);
      if (key !== null) listIn(open, key).push(node);
    }
    for (const [key, nodes] of open) {
      const found = free.get(key) || [];
      if (onlyEqualCounts && nodes.length !== found.length) continue;
      const couples = onlyEqualCounts
        ? nodes.map((node, at) => [node, found[at]])
        : namedThenInOrder(nodes, found);
      for (const [a, b] of couples) if (!differ(a, b)) pair(a, b);
    }
  };
  match((node, known) => `${known.get(node.id)} ${placeOf(node)}`);
  match((node) => (node.params.length || node.source ? placeOf(node) : null), true);
  match((node, known) => known.get(node.id));
  match(placeOf, true);
  match((node) => (node.params.length ? roleOf(node) : null), true);
  match((node) => JSON.stringify([node.op, node.name, node.op === "placeholder" ? "" : node.target]));
  pairByInputs(one, other, pairs, taken, differ);
  return pairs;
}

function namedThenInOrder(nodes, others) {
  const byName = new Map(others.map((node) => [node.name, node]));
  const named = [],
    rest = [];
  for (const node of nodes) {
    const same = byName.get(node.name);
    if (same) named.push([node, same]);
    else rest.push(node);
    byName.delete(node.name);
  }
  const left = [...byName.values()];
  return [...named, ...rest.slice(0, left.length).map((node, at) => [node, left[at]])];
}

// Whether two nodes work for different parameters that both graphs could have.
function differentParams(one, other) {
  const names = (graph) => new Set(graph.nodes.flatMap((node) => node.params));
  const [old, now] = [names(one), names(other)];
  const common = (name) => old.has(name) && now.has(name);
  return (a, b) => {
    if (!a.params.length || !b.params.length) return false;
    const its = new Set(b.params);
    return !a.params.some((name) => its.has(name)) && [...a.params, ...b.params].some(common);
  };
}

// Where a node stands in the model, without its number among similar nodes. Texts of the page have
// no line breaks.
function placeOf(node) {
  const { source } = node;
  return `${roleOf(node)}\n${node.values}\n${source ? `${source.module}\n${source.text}` : ""}`;
}

// What a node does for which parameters.
function roleOf(node) {
  const target = node.op === "placeholder" ? stem(node.name) : node.target;
  return `${node.op}\n${target}\n${node.params.join("\n")}\n${node.tag ? node.tag.role : ""}`;
}

function stem(name) {
  return name.replace(/_?\d+$/, "");
}

// Id -> a number that equal computations share, in all graphs of the page.
const expressionNumbers = new Map();
function expressions(graph) {
  return graph.memoize("expressions", () => {
    const found = new Map(),
      inputs = new Map();
    for (const node of graph.nodes) {
      const key = JSON.stringify([node.op, ...expressionOf(graph, node, found, inputs)]);
      if (!expressionNumbers.has(key)) expressionNumbers.set(key, expressionNumbers.size);
      found.set(node.id, expressionNumbers.get(key));
    }
    return found;
  });
}

function expressionOf(graph, node, found, inputs) {
  if (node.op === "placeholder" || node.op === "get_attr") {
    if (node.params.length) return [node.params, node.values];
    const kind = `${stem(node.name)} ${node.values}`;
    const number = inputs.get(kind) || 0;
    inputs.set(kind, number + 1);
    return [kind, number];
  }
  return [codeWithoutNames(graph, node), node.values, node.inputs.map((id) => found.get(id))];
}

// The code without the names of nodes, which are compared as inputs.
function codeWithoutNames(graph, node) {
  if (node.op === "output") return "";
  const names = new Set(node.inputs.map((id) => (graph.node(id) || node).name));
  return node.code
    .slice(node.code.indexOf("=") + 1)
    .replace(/[A-Za-z_]\w*/g, (word) => (names.has(word) ? "#" : word));
}

// How many free readers of a node the last round looks at, which bounds its work.
const MOST_USERS = 8;

function pairByInputs(one, other, pairs, taken, differ) {
  const free = new Map();
  const key = (read, place, node) => `${read}/${place}/${node.op}/${node.target}`;
  for (const node of other.nodes)
    if (!taken.has(node.id))
      node.inputs.forEach((read, place) => listIn(free, key(read, place, node)).push(node));
  for (const node of one.nodes) {
    if (pairs.has(node.id)) continue;
    for (const [place, read] of node.inputs.entries()) {
      const users = free.get(key(pairs.get(read), place, node)) || [];
      while (users.length && taken.has(users[0].id)) users.shift();
      const found = users
        .slice(0, MOST_USERS)
        .find((user) => !taken.has(user.id) && !differ(node, user));
      if (!found) continue;
      pairs.set(node.id, found.id);
      taken.add(found.id);
      break;
    }
  }
}

// Returns the indices of a longest increasing subsequence of distinct values. Among those of equal
// length, one with the largest sum of preferences (0 or 1) is taken.
function longestRising(values, preference) {
  if (values.every((value, at) => !at || values[at - 1] < value)) return new Set(values.keys());
  const sorted = [...values].sort((a, b) => a - b);
  const rank = new Map(sorted.map((value, at) => [value, at + 1]));
  const size = values.length;
  const best = new Float64Array(size + 1), // a Fenwick tree: best score of a prefix,
    end = new Int32Array(size + 1).fill(-1), // and the index that it ends with
    link = new Int32Array(size);
  const prefix = (key) => {
    let [score, at] = [0, -1];
    for (; key > 0; key -= key & -key)
      if (best[key] > score || (best[key] === score && end[key] > at))
        [score, at] = [best[key], end[key]];
    return [score, at];
  };
  values.forEach((value, at) => {
    const [score, previous] = prefix(rank.get(value) - 1);
    link[at] = previous;
    const own = score + size + 1 + preference[at];
    for (let key = rank.get(value); key <= size; key += key & -key)
      if (own > best[key] || (own === best[key] && at > end[key]))
        [best[key], end[key]] = [own, at];
  });
  const kept = new Set();
  for (let [, at] = prefix(size); at >= 0; at = link[at]) kept.add(at);
  return kept;
}

// If either of two nodes may have moved, the communication has: passes move communication.
function communicates(node) {
  return Boolean(node.collective || node.waits || (node.tag && node.tag.role.includes("_input")));
}

// The pairs and the rows of two graphs, which every redraw of a comparison needs.
const comparisons = new WeakMap();
function compared(one, other) {
  if (!comparisons.has(one)) comparisons.set(one, new WeakMap());
  const known = comparisons.get(one);
  if (!known.has(other)) {
    const pairs = pairNodes(one, other);
    const edited = new Map(); // A pair that moved is asked for twice.
    const editsOf = (a, b) => {
      if (!edited.has(a.id)) edited.set(a.id, edits(one, a, other, b, pairs));
      return edited.get(a.id);
    };
    const rows = alignPairs(one, other, pairs, unmoved(one, other, pairs), editsOf);
    known.set(other, { pairs, rows });
  }
  return known.get(other);
}

// Computes what Compare will show first, and what "Why?" shows, when nothing else is to do. Each step
// leaves room for input.
function prepareComparison() {
  const asked = current.graph;
  if (!asked || state.tab === "compare") return;
  const defaultPair = () => {
    const { left, right } = sidesOfComparison();
    return right ? [left.graph, right.graph] : [];
  };
  const passPair = () => [current.before, asked];
  const parts = [
    (one) => expressions(one),
    (one, other) => expressions(other),
    (one, other) => layersOf(one) && layersOf(other),
    (one, other) => compared(one, other),
  ];
  const steps = [defaultPair, passPair].flatMap((pair) =>
    parts.map((part, at) => () => {
      const [one, other] = pair(); // the other side may have changed since the last step
      if (!one || !other || one === other) return;
      if (at > 1 || one.compile !== other.compile) part(one, other);
    }),
  );
  const next = () => {
    if (!steps.length || current.graph !== asked) return;
    steps.shift()();
    whenIdle(next);
  };
  whenIdle(next);
}

function whenIdle(work) {
  if (window.requestIdleCallback) requestIdleCallback(work, { timeout: 5000 });
  else setTimeout(work, 200);
}

const UNCHANGED = []; // steps share the nodes that do not change

// Ids in the first graph of the nodes that did not move.
function unmoved(one, other, pairs) {
  const back = new Map([...pairs].map(([a, b]) => [b, a]));
  const common = other.nodes
    .filter((node) => back.has(node.id))
    .map((node) => one.node(back.get(node.id)));
  const kept = longestRising(
    common.map((node) => one.index.get(node.id)),
    common.map((node) => (communicates(other.node(pairs.get(node.id))) ? 0 : 1)),
  );
  return new Set(common.filter((_, at) => kept.has(at)).map((node) => node.id));
}

// Returns rows {before, after, kinds, counted} of two graphs. A node that was not moved is one row with
// both sides set, an anchor. Removed, inserted and moved nodes fill the rows in between; where two
// that are no pair share a row, `own` and `its` are the kinds of each.
//   stays: ids in the first graph of the nodes that did not move
//   editsOf: the further kinds of changes of a pair
function alignPairs(one, other, pairs, stays, editsOf) {
  const back = new Map([...pairs].map(([a, b]) => [b, a]));
  const kindsOf = (a, b) => [
    ...(!a ? ["inserted"] : !b ? ["removed"] : []),
    ...(a && b && !stays.has(a.id) ? ["moved"] : []),
    ...(a && b ? editsOf(a, b) : []),
  ];
  const rows = [];
  const flush = (left, right) => {
    for (let i = 0; i < Math.max(left.length, right.length); i++) {
      const [before, after] = [left[i], right[i]];
      const own = before ? kindsOf(before, other.node(pairs.get(before.id))) : [];
      const its = after ? kindsOf(one.node(back.get(after.id)), after) : [];
      // A pair that moved stands in two rows, and counts in the first graph's.
      const counted = [...own, ...(after && !back.has(after.id) ? its : [])];
      rows.push({ before, after, kinds: [...new Set([...own, ...its])], counted, own, its });
    }
  };
  let at = 0,
    next = 0;
  for (const node of one.nodes.filter((each) => stays.has(each.id))) {
    const left = [],
      right = [];
    while (one.nodes[at].id !== node.id) left.push(one.nodes[at++]);
    const twin = pairs.get(node.id);
    while (other.nodes[next].id !== twin) right.push(other.nodes[next++]);
    at += 1;
    next += 1;
    flush(left, right);
    const after = other.node(twin);
    const kinds = node === after ? UNCHANGED : editsOf(node, after);
    rows.push({ before: node, after, kinds, counted: kinds, anchor: true });
  }
  flush(one.nodes.slice(at), other.nodes.slice(next));
  return rows;
}

function edits(graph, node, otherGraph, other, pairs) {
  const kinds = [];
  if (node === other) return kinds; // steps share the nodes that do not change
  const sameInputs =
    node.inputs.length === other.inputs.length &&
    node.inputs.every((id, at) => pairs.get(id) === other.inputs[at]);
  const sameCode = () =>
    node.op === "placeholder" ||
    node.code === other.code ||
    codeWithoutNames(graph, node) === codeWithoutNames(otherGraph, other);
  if (!sameInputs || !sameCode()) kinds.push("rewired");
  const tag = ({ tag: found, params }) => JSON.stringify([found, params]);
  const tagged = node.tag || other.tag || node.params.length || other.params.length;
  if (tagged && tag(node) !== tag(other)) kinds.push("retagged");
  if (node.mark !== other.mark) kinds.push("recompute-changed");
  if (node.values !== other.values) kinds.push("retyped");
  return kinds;
}
