// Folds the table of collectives by module: those of equal layers are one row, with their number
// and their sums.

const SUMMED = ["bytes", "time", "exposed", "queued", "measured", "waited"];

// "all_gather of layers.*.mlp" and the like: what the collectives of one row have in common.
function collectiveKey(each) {
  const { params, collective } = each.node;
  const modules = [...new Set(params.map((name) => template(ownerOf(name))))];
  const where = modules.length ? someOf(modules, 2) : each.node.name;
  const key = [collective.kind, collective.group, ...(modules.length ? modules : [where])];
  return { name: where, key: key.join("\n") };
}

// Rows {fold, name, members, key}, each followed by its members if it is open. They are in the
// order of the first member, or by their sums. One collective of its kind stays as it is.
function foldCollectives(shown, column, down) {
  const groups = new Map();
  for (const each of shown) {
    const { name, key } = collectiveKey(each);
    if (!groups.has(key)) groups.set(key, { fold: "collectives", name, key, members: [] });
    groups.get(key).members.push(each);
  }
  const rows = [...groups.values()];
  if (SUMMED.includes(column.key)) {
    const sums = new Map(rows.map((row) => [row, sumOf(row.members, column.value)]));
    rows.sort((a, b) => (down ? -1 : 1) * (sums.get(a) - sums.get(b)));
  }
  return rows.flatMap((row) => {
    if (row.members.length === 1) return row.members;
    row.key = `${state.graph}/${state.step}/collectives/${row.key}`;
    const chosen = row.members.some(isChosen);
    return openFolds.has(row.key) || chosen ? [row, ...row.members] : [row];
  });
}

function collectiveFold(columns, row) {
  const { members, name } = row;
  const open = openFolds.has(row.key);
  const text = (column) => {
    const { key, value } = column;
    if (key === "number") return open ? "▾" : "▸";
    if (key === "node") return middleCut(name);
    if (key === "params") return el("b", {}, `× ${members.length}`);
    if (key === "kind" || key === "group") return column.text(members[0]);
    if (key === "distance") return rangeText(members, value, countText);
    if (key === "compute") return rangeText(members, value, timeText);
    if (!SUMMED.includes(key)) return "";
    return (key === "bytes" ? bytesText : timeText)(sumOf(members, value));
  };
  const title = [`${members[0].of.kind} of ${name}`, ...foldRanges(members)].join("\n");
  const props = { class: "grid-row fold", "aria-expanded": open, title };
  return gridRow(columns, text, members.some((each) => each.exposed), props);
}

// The range of the figures of one collective, and the ones that differ from the others.
function foldRanges(members) {
  const figure = (key) => (each) => (key === "bytes" ? each.of.nbytes : each[key]);
  const range = (key, text) => `${key}: ${rangeText(members, figure(key), text)} each`;
  const odd = (key) => {
    const found = oddText(members, figure(key), (each) => each.node.params[0] || each.node.name);
    return found && `not as the others in ${key}: ${found}`;
  };
  return [
    range("bytes", bytesText),
    range("time", timeText),
    range("exposed", timeText),
    odd("bytes"),
    odd("exposed"),
  ].filter(Boolean);
}
