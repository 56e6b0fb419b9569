// Folds the table of collectives by module: those of equal layers are one row, with their number
// and their sums.

const SUMMED = ["bytes", "time", "exposed", "queued", "measured", "waited"];

// "all_gather of layers.*.mlp" and the like: what the collectives of one row have in common.
function collectiveKey(each) {
  const { params, collective } = each.node;
  const modules = [...new Set(params.map((name) => template(ownerOf(name))))];
  const where = modules.length ? someOf(modules, 2) : each.node.name;
  return { name: where, key: `${collective.kind}\n${collective.group}\n${modules.join("\n") || where}` };
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
    const sum = (row) => row.members.reduce((total, each) => total + column.value(each), 0);
    const sums = new Map(rows.map((row) => [row, sum(row)]));
    rows.sort((a, b) => (down ? -1 : 1) * (sums.get(a) - sums.get(b)));
  }
  return rows.flatMap((row) => {
    if (row.members.length === 1) return row.members;
    row.key = `${state.graph}/${state.step}/collectives/${row.key}`;
    const chosen = row.members.some((each) => each.id === state.node);
    return openFolds.has(row.key) || chosen ? [row, ...row.members] : [row];
  });
}

function collectiveFold(columns, row) {
  const { members, name } = row;
  const first = members[0].node.collective;
  const open = openFolds.has(row.key);
  const text = (column) => {
    const values = members.map(column.value);
    switch (column.key) {
      case "number":
        return open ? "▾" : "▸";
      case "node":
        return middleCut(name);
      case "params":
        return el("b", {}, `× ${members.length}`);
      case "kind":
      case "group":
        return column.text(members[0]);
      case "bytes":
        return bytesText(values.reduce((sum, value) => sum + value, 0));
      case "distance":
        return rangeText(members, column.value, countText);
      case "compute":
        return rangeText(members, column.value, timeText);
      default:
        return SUMMED.includes(column.key)
          ? timeText(values.reduce((sum, value) => sum + value, 0))
          : "";
    }
  };
  return el(
    "div",
    {
      class: "grid-row fold",
      style: extraColumns(columns),
      "aria-expanded": open,
      title: [`${first.kind} of ${name}`, ...foldRanges(members)].join("\n"),
    },
    columns.map((column) =>
      el(
        "span",
        {
          role: "gridcell",
          class: [
            column.right ? "right" : "",
            `col-${column.key}`,
            column.key === "exposed" && members.some((each) => each.exposed) ? "exposed-text" : "",
          ].join(" "),
        },
        text(column),
      ),
    ),
  );
}

// The range of the figures of one collective, and the ones that differ from the others.
function foldRanges(members) {
  const figure = (key) => (each) => (key === "bytes" ? each.node.collective.nbytes : each[key]);
  const range = (key, text) => `${key}: ${rangeText(members, figure(key), text)} each`;
  const odd = (key) => {
    const found = oddOnes(members, figure(key));
    return found.length && found.length < members.length
      ? `not as the others in ${key}: ${someOf(
          found.map((each) => each.node.params[0] || each.node.name),
          3,
        )}`
      : "";
  };
  return [
    range("bytes", bytesText),
    range("time", timeText),
    range("exposed", timeText),
    odd("bytes"),
    odd("exposed"),
  ].filter(Boolean);
}
