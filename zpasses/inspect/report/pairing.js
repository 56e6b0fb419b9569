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
  const match = (keyOf, onlyEqualCounts) => {
    const free = new Map(),
      open = new Map();
    for (const node of other.nodes)
      if (!taken.has(node.id)) listIn(free, keyOf(node, right)).push(node);
    for (const node of one.nodes)
      if (!pairs.has(node.id)) listIn(open, keyOf(node, left)).push(node);
    for (const [key, nodes] of open) {
      const found = free.get(key) || [];
      if (onlyEqualCounts && nodes.length !== found.length) continue;
      const byName = new Map(onlyEqualCounts ? [] : found.map((node) => [node.name, node]));
      const rest = nodes.filter((node) => {
        const same = byName.get(node.name);
        if (same) pair(node, same);
        return !same;
      });
      const unpaired = found.filter((node) => !taken.has(node.id));
      rest.slice(0, unpaired.length).forEach((node, at) => pair(node, unpaired[at]));
    }
  };
  match((node, known) => known.get(node.id));
  match(
    (node) =>
      JSON.stringify([
        node.op === "placeholder" ? stem(node.name) : node.target,
        node.values,
        node.params,
        node.source && [node.source.file, node.source.line, node.source.module],
      ]),
    true,
  );
  match((node) => JSON.stringify([node.op, node.name, node.op === "placeholder" ? "" : node.target]));
  pairByInputs(one, other, pairs, taken);
  return pairs;
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
  // The code without names: its inputs are compared as expressions.
  const names = new Set(node.inputs.map((id) => (graph.node(id) || node).name));
  const code = node.code
    .slice(node.code.indexOf("=") + 1)
    .replace(/[A-Za-z_]\w*/g, (word) => (names.has(word) ? "#" : word));
  return [node.op === "output" ? "" : code, node.values, node.inputs.map((id) => found.get(id))];
}

function pairByInputs(one, other, pairs, taken) {
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
      if (!users.length) continue;
      const found = users.shift();
      pairs.set(node.id, found.id);
      taken.add(found.id);
      break;
    }
  }
}

// Returns the indices of a longest increasing subsequence.
function longestRising(values) {
  const ends = [],
    link = [];
  values.forEach((value, at) => {
    let low = 0,
      high = ends.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[ends[middle]] < value) low = middle + 1;
      else high = middle;
    }
    link[at] = low ? ends[low - 1] : -1;
    ends[low] = at;
  });
  const kept = new Set();
  for (let at = ends.length ? ends[ends.length - 1] : -1; at >= 0; at = link[at]) kept.add(at);
  return kept;
}

// Returns rows {before, after, kinds, counted} of two graphs, as `alignRows` does for a pass.
function alignPairs(one, other, pairs) {
  const common = one.nodes.filter((node) => pairs.has(node.id));
  const kept = longestRising(common.map((node) => other.index.get(pairs.get(node.id))));
  const stays = new Set(common.filter((_, at) => kept.has(at)).map((node) => node.id));
  const back = new Map([...pairs].map(([a, b]) => [b, a]));
  const kindsOf = (a, b) => [
    ...(!a ? ["inserted"] : !b ? ["removed"] : []),
    ...(a && b && !stays.has(a.id) ? ["moved"] : []),
    ...(a && b ? edits(a, b, pairs) : []),
  ];
  const rows = [];
  const flush = (left, right) => {
    for (let i = 0; i < Math.max(left.length, right.length); i++) {
      const [before, after] = [left[i], right[i]];
      const own = before ? kindsOf(before, other.node(pairs.get(before.id))) : [];
      const its = after ? kindsOf(one.node(back.get(after.id)), after) : [];
      // A pair that moved stands in two rows, and counts in the first graph's.
      const counted = [...own, ...(after && !back.has(after.id) ? its : [])];
      rows.push({ before, after, kinds: [...new Set([...own, ...its])], counted });
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
    const kinds = kindsOf(node, after);
    rows.push({ before: node, after, kinds, counted: kinds, anchor: true });
  }
  flush(one.nodes.slice(at), other.nodes.slice(next));
  return rows;
}

function edits(one, other, pairs) {
  const kinds = [];
  const rewired =
    one.inputs.length !== other.inputs.length ||
    one.inputs.some((id, at) => pairs.get(id) !== other.inputs[at]);
  if ((one.op !== "placeholder" && one.target !== other.target) || rewired) kinds.push("rewired");
  if ((one.tag && one.tag.role) !== (other.tag && other.tag.role)) kinds.push("retagged");
  if (one.mark !== other.mark) kinds.push("recompute-changed");
  if (one.values !== other.values) kinds.push("retyped");
  return kinds;
}
