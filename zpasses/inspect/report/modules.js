// Folds nodes and figures by module. Equal layers are shown once, with their number, their range,
// and the ones that differ, as `zpasses/inspect/modules.py` does.

const FOLDS_FROM = 1500; // Nodes from which lists are folded unless the reader chooses otherwise.
const openFolds = new Set();

function isFolded(count) {
  return state.view.fold ? state.view.fold === "yes" : count >= FOLDS_FROM;
}

function foldSwitch(count, change) {
  return el(
    "label",
    { title: "Equal layers are one row, with their number and those that differ" },
    el("input", {
      type: "checkbox",
      checked: isFolded(count),
      "aria-label": "Fold by module",
      onchange: (event) => {
        keep({ fold: event.target.checked ? "yes" : "no" });
        change();
      },
    }),
    " fold by module",
  );
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
    const layer = layerAt(item) ?? (blocks.length ? blocks[blocks.length - 1].layer : "");
    if (!blocks.length || blocks[blocks.length - 1].layer !== layer)
      blocks.push({ layer, items: [] });
    blocks[blocks.length - 1].items.push(item);
  }
  return blocks;
}

// Blocks that follow each other and differ only in the number of their layer: [{name, blocks}].
function groupsOf(blocks) {
  const groups = [];
  for (const block of blocks) {
    const name = template(block.layer);
    const last = groups[groups.length - 1];
    if (last && last.name === name && name.includes("*")) last.blocks.push(block);
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

function median(values) {
  const sorted = [...values].sort((a, b) => a - b),
    half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

// A row that stands for a layer, or for all layers that are equal. Layers are compared by what they
// compute: passes move collectives between them.
function foldRow(row, nodesOf, extra) {
  const { blocks, name } = row;
  const computed = new Map(
    blocks.map((block) => {
      const nodes = nodesOf(block);
      const compute = nodes.filter((node) => node.cost > 0 && !node.collective);
      return [
        block,
        {
          nodes: nodes.length,
          kernels: compute.length,
          time: compute.reduce((sum, node) => sum + node.cost, 0),
          collectives: nodes.filter((node) => node.collective).length,
        },
      ];
    }),
  );
  const figure = (key) => (block) => computed.get(block)[key];
  const range = (key, text) => rangeText(blocks, figure(key), text);
  const counted = (what) => (size) => countText(size) + (what ? ` ${what}` : "");
  const odd =
    blocks.length > 1
      ? blocks.filter(
          (block) =>
            oddOnes(blocks, figure("kernels")).includes(block) ||
            oddOnes(blocks, figure("time")).includes(block),
        )
      : [];
  const most = (key) => Math.max(...blocks.map(figure(key)));
  const open = openFolds.has(row.key);
  return el(
    "div",
    { class: `fold ${row.deep ? "deep" : ""}`, "aria-expanded": open },
    el("span", { class: "arrow", "aria-hidden": true }, open ? "▾" : "▸"),
    el("b", {}, name || "(no module)"),
    blocks.length > 1 && el("span", { class: "times" }, `× ${countText(blocks.length)}`),
    extra,
    el(
      "span",
      { class: "muted" },
      [
        `${range("nodes", counted())} ${most("nodes") === 1 ? "node" : "nodes"}`,
        most("time") && `${range("time", timeText)} of compute${blocks.length > 1 ? " each" : ""}`,
        most("collectives") &&
          `${range("collectives", counted())} ${most("collectives") === 1 ? "collective" : "collectives"}`,
        odd.length &&
          odd.length < blocks.length &&
          `not as the others: ${someOf(
            odd.map((block) => block.layer),
            3,
          )}`,
      ]
        .filter(Boolean)
        .join(" · "),
    ),
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
      total: members.reduce((sum, [, value]) => sum + value, 0),
    }))
    .sort((a, b) => b.total - a.total);
}

// Bytes of buffers by the module of their parameters, or of the line that allocates them.
function bytesByModule(buffers) {
  const found = new Map();
  const add = (module, bytes) => found.set(module, (found.get(module) || 0) + bytes);
  for (const { nbytes, params, node } of buffers) {
    const sizes = params.map((name) => (current.compile.parameters[name] || [1])[0] || 1);
    const whole = sizes.reduce((sum, size) => sum + size, 0);
    params.forEach((name, at) => add(ownerOf(name), (nbytes * sizes[at]) / whole));
    if (!params.length) add(node.source ? node.source.module : "", nbytes);
  }
  return found;
}

function ownerOf(param) {
  const end = param.lastIndexOf(".");
  return end < 0 ? param : param.slice(0, end);
}
