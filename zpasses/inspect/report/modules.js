// Folds nodes and figures by module. Equal layers are shown once, with their number, their range,
// and the ones that differ, as `zpasses/inspect/modules.py` does.

const FOLDS_FROM = 1500; // Nodes from which lists are folded unless the reader chooses otherwise.
const openFolds = new Set();

function isFolded(count) {
  return state.view.fold ? state.view.fold === "yes" : count >= FOLDS_FROM;
}

function foldSwitch(count, change) {
  const fold = (checked) => {
    keep({ fold: checked ? "yes" : "no" });
    change();
  };
  const title = "Equal layers are one row, with their number and those that differ";
  const label = { "aria-label": "Fold by module" };
  return checkBox("fold by module", isFolded(count), fold, label, title);
}

// Computes a text of a module once. A graph of 20,000 nodes has some hundred modules.
function perModule(compute) {
  const known = new Map();
  return (module) => {
    let found = known.get(module);
    if (found === undefined) known.set(module, (found = compute(module)));
    return found;
  };
}

// "layers.12.mlp.0" -> "layers.*.mlp.0"
const template = perModule((module) => {
  const parts = module.split(".");
  const numbers = parts.flatMap((part, at) => (/^\d+$/.test(part) ? [at] : []));
  for (const at of numbers) if (at < parts.length - 1 || at === numbers[0]) parts[at] = "*";
  return parts.join(".");
});

// The layer that a module is in: its path up to the first number, or the module itself.
const layerOf = perModule((module) => {
  const parts = module.split(".");
  const at = parts.findIndex((part) => /^\d+$/.test(part));
  return at < 0 ? module : parts.slice(0, at + 1).join(".");
});

// Node id -> the layer whose computation it stands in. A collective that a pass has moved stands
// with the layer that runs there, and not with that of its parameters.
function layersOf(graph) {
  return graph.memoize("layers", () => {
    const found = new Map();
    let layer = "";
    for (const node of graph.nodes) {
      if (node.op === "placeholder" || node.op === "get_attr") {
        found.set(node.id, "(inputs)");
        continue;
      }
      const own = node.source && node.source.module ? layerOf(node.source.module) : "";
      if (own && node.cost > 0 && !node.collective) layer = own;
      found.set(node.id, node.op === "output" ? "(output)" : layer || "(before the first layer)");
    }
    return found;
  });
}

// Runs of consecutive items of one layer: [{layer, items}].
function blocksOf(items, layerAt) {
  const blocks = [];
  for (const item of items) {
    const layer = layerAt(item) ?? blocks.at(-1)?.layer ?? "";
    if (blocks.at(-1)?.layer !== layer) blocks.push({ layer, items: [] });
    blocks.at(-1).items.push(item);
  }
  return blocks;
}

// Blocks that follow each other and differ only in the number of their layer: [{name, blocks}].
function groupsOf(blocks) {
  const groups = [];
  for (const block of blocks) {
    const name = template(block.layer);
    if (groups.at(-1)?.name === name && name.includes("*")) groups.at(-1).blocks.push(block);
    else groups.push({ name, blocks: [block] });
  }
  return groups;
}

// Rows of a folded list: {fold, name, blocks, key} for a fold, and the items of open folds. `where`
// tells the folds of one list from those of another. The selected item's folds are open.
function foldRows(items, layerAt, where, isSelected) {
  const rows = [];
  groupsOf(blocksOf(items, layerAt)).forEach((group, at) => {
    const several = group.blocks.length > 1;
    const key = `${where}/${at}/${group.name}`;
    const chosen = group.blocks.some((block) => block.items.some(isSelected));
    if (several) rows.push({ fold: "group", name: group.name, blocks: group.blocks, key });
    if (several && !openFolds.has(key) && !chosen) return;
    for (const [index, block] of group.blocks.entries()) {
      const inner = `${key}/${index}`;
      rows.push({ fold: "block", name: block.layer, blocks: [block], key: inner, deep: several });
      if (openFolds.has(inner) || block.items.some(isSelected)) rows.push(...block.items);
    }
  });
  return rows;
}

function toggleFold(row) {
  if (!openFolds.delete(row.key)) openFolds.add(row.key);
}

// The figures of blocks: one text if all are equal, else their range and the ones that differ.
function rangeText(blocks, figure, text) {
  const values = blocks.map(figure);
  const [least, most] = [Math.min(...values), Math.max(...values)];
  return text(least) === text(most) ? text(least) : `${text(least)} to ${text(most)}`;
}

function oddOnes(blocks, figure) {
  const values = blocks.map(figure);
  const middle = median(values);
  return blocks.filter((_, at) => Math.abs(values[at] - middle) > 0.05 * Math.abs(middle));
}

// Names of the blocks that differ, or "" if none of them is like the others.
function oddText(blocks, figure, name) {
  const odd = blocks.length > 1 ? oddOnes(blocks, figure) : [];
  return odd.length < blocks.length ? someOf(odd.map(name), 3) : "";
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b),
    half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

// A row that stands for a layer, or for all layers that are equal. Layers are compared by what they
// compute: passes move collectives between them.
function foldRow(row, nodesOf, extra) {
  const { blocks, name } = row;
  const figures = new Map(
    blocks.map((block) => {
      const nodes = nodesOf(block);
      const compute = nodes.filter((node) => node.cost > 0 && !node.collective);
      const collectives = nodes.filter((node) => node.collective).length;
      const time = sumOf(compute, (node) => node.cost);
      return [block, { nodes: nodes.length, kernels: compute.length, time, collectives }];
    }),
  );
  const figure = (key) => (block) => figures.get(block)[key];
  const most = (key) => Math.max(...blocks.map(figure(key)));
  const counted = (key, what) =>
    `${rangeText(blocks, figure(key), countText)} ${what}${most(key) === 1 ? "" : "s"}`;
  const several = blocks.length > 1;
  const odd = new Set(["kernels", "time"].flatMap((key) => oddOnes(blocks, figure(key))));
  const others = blocks.filter((block) => odd.has(block)).map((block) => block.layer);
  const time = `${rangeText(blocks, figure("time"), timeText)} of compute${several ? " each" : ""}`;
  const differ = several && odd.size > 0 && odd.size < blocks.length;
  const texts = [
    counted("nodes", "node"),
    most("time") && time,
    most("collectives") && counted("collectives", "collective"),
    differ && `not as the others: ${someOf(others, 3)}`,
  ];
  const open = openFolds.has(row.key);
  return el(
    "div",
    { class: `fold ${row.deep ? "deep" : ""}`, "aria-expanded": open },
    el("span", { class: "arrow", "aria-hidden": true }, open ? "▾" : "▸"),
    el("b", {}, name || "(no module)"),
    several && span("times", `× ${countText(blocks.length)}`),
    extra,
    muted(texts.filter(Boolean).join(" · ")),
  );
}

// Module -> bytes, folded: [{name, members: [[module, bytes]], total}], largest first.
function foldFigures(figures) {
  const groups = new Map();
  for (const [module, value] of figures) listIn(groups, template(module)).push([module, value]);
  return [...groups]
    .map(([name, members]) => ({
      name: members.length > 1 ? name : members[0][0],
      members,
      total: sumOf(members, ([, value]) => value),
    }))
    .sort((a, b) => b.total - a.total);
}

// Bytes of buffers by the module of their parameters, or of the line that allocates them.
function bytesByModule(buffers) {
  const found = new Map();
  const add = (module, bytes) => found.set(module, (found.get(module) || 0) + bytes);
  for (const { nbytes, params, node } of buffers) {
    const sizes = params.map((name) => (current.compile.parameters[name] || [1])[0] || 1);
    const whole = sumOf(sizes, (size) => size);
    params.forEach((name, at) => add(ownerOf(name), (nbytes * sizes[at]) / whole));
    if (!params.length) add(node.source ? node.source.module : "", nbytes);
  }
  return found;
}

function ownerOf(param) {
  const end = param.lastIndexOf(".");
  return end < 0 ? param : param.slice(0, end);
}
