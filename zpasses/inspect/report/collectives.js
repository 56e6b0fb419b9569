// Every collective in a table that sorts and filters; a row leads to its node.

const COLUMNS = [
  { key: "number", name: "#", right: true, value: (each) => each.number, text: (each) => each.number + 1 },
  { key: "node", name: "node", value: (each) => each.form.name, text: (each) => middle(each.form.name, 19) },
  { key: "kind", name: "kind", value: (each) => each.form.collective.kind, text: (each) => each.form.collective.kind.replace("_into_tensor", "").replace("_tensor", "") },
  { key: "group", name: "group", value: (each) => each.form.collective.group, text: (each) => `${each.form.collective.group} (${each.form.collective.ranks})` },
  { key: "params", name: "parameters", value: (each) => each.form.params[0] || "", text: (each) => each.form.params.length > 1 ? `${middle(each.form.params[0], 30)} +${each.form.params.length - 1}` : each.form.params[0] || "" },
  { key: "bytes", name: "bytes", right: true, value: (each) => each.form.collective.nbytes, text: (each) => bytesText(each.form.collective.nbytes) },
  { key: "distance", name: "distance", right: true, value: (each) => each.distance, text: (each) => each.distance.toLocaleString("en") },
  { key: "compute", name: "compute between", right: true, value: (each) => each.compute, text: (each) => timeText(each.compute) },
  { key: "time", name: "time", right: true, value: (each) => each.time, text: (each) => timeText(each.time) },
  { key: "exposed", name: "exposed", right: true, value: (each) => each.exposed, text: (each) => timeText(each.exposed) },
  { key: "route", name: "route", value: (each) => each.form.collective.route, text: (each) => each.form.collective.route },
  { key: "verdict", name: "verdict", value: (each) => each.form.collective.verdict, text: (each) => each.form.collective.verdict },
];
const sorting = { key: "number", down: false };
const collectiveFilter = { text: "", kind: "", exposed: false };

function drawCollectives(main) {
  const graph = current.graph;
  if (!graph) return put(main, notWritten());
  const all = graph.flights;
  if (!isModelled(current.step)) return put(main, notModelled());
  if (!all.length) return put(main, el("p", { class: "muted pad" }, "This graph does not communicate."));
  const columns = COLUMNS.filter((column) => !["route", "verdict"].includes(column.key) || all.some((each) => column.value(each)));
  let shown = [];
  const list = rowList({
    label: "Collectives", role: "grid", height: 28,
    row: (at) => collectiveRow(columns, shown[at]),
    pick: (at) => go({ node: shown[at].id }),
  });
  const count = el("span", { class: "muted", role: "status" });
  const head = el("div", { class: `grid-head columns-${columns.length}`, role: "row" });
  const fill = () => {
    const words = collectiveFilter.text.toLowerCase().split(/\s+/).filter(Boolean);
    const column = columns.find((each) => each.key === sorting.key) || columns[0];
    shown = all.filter((each) => words.every((word) => matches(each.form, word))
      && (!collectiveFilter.kind || each.form.collective.kind === collectiveFilter.kind) && (!collectiveFilter.exposed || each.exposed > 0));
    shown.sort((a, b) => {
      const one = column.value(a), other = column.value(b);
      return (sorting.down ? -1 : 1) * (typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other) || a.number - b.number;
    });
    const sum = (pick) => shown.reduce((total, each) => total + pick(each), 0);
    clear(count, `${shown.length === all.length ? plural(all.length, "collective") : `${shown.length} of ${plural(all.length, "collective")}`} · ${bytesText(sum((each) => each.form.collective.nbytes))} put in · ${timeText(sum((each) => each.time))} · `,
      el("b", { class: "exposed-text" }, `${timeText(sum((each) => each.exposed))} exposed`));
    clear(head, columns.map((each) => sortButton(each, fill)));
    list.fill(shown.length, shown.findIndex((each) => each.id === state.node));
    // The head stands over the rows, which a scroll bar may narrow.
    requestAnimationFrame(() => { head.style.paddingRight = `${14 + list.element.offsetWidth - list.element.clientWidth}px`; });
  };
  const kinds = [...new Set(all.map((each) => each.form.collective.kind))];
  put(main,
    el("div", { class: "bar" },
      filterField("Filter: node, kind, parameter", collectiveFilter.text, (text) => { collectiveFilter.text = text; fill(); }),
      el("select", { "aria-label": "Kind of collective", onchange: (event) => { collectiveFilter.kind = event.target.value; fill(); } },
        el("option", { value: "" }, "all kinds"), kinds.map((kind) => el("option", { value: kind, selected: kind === collectiveFilter.kind }, kind))),
      el("label", {}, el("input", { type: "checkbox", checked: collectiveFilter.exposed, onchange: (event) => { collectiveFilter.exposed = event.target.checked; fill(); } }), " exposed only"),
      count),
    el("div", { class: "grid" }, head, list.element));
  fill();
}

function sortButton(column, fill) {
  const active = sorting.key === column.key;
  return el("span", { role: "columnheader", class: `${column.right ? "right" : ""} col-${column.key}`, "aria-sort": active ? (sorting.down ? "descending" : "ascending") : "none" },
    button(`${column.name}${active ? (sorting.down ? " ↓" : " ↑") : ""}`, (event) => {
      // Figures are most interesting from the largest down.
      Object.assign(sorting, active ? { down: !sorting.down } : { key: column.key, down: Boolean(column.right) && column.key !== "number" });
      fill();
      [...document.querySelectorAll(".grid-head button")][COLUMNS.findIndex((each) => each.key === column.key)]?.focus();
    }));
}

function collectiveRow(columns, each) {
  return el("div", { class: `grid-row columns-${columns.length}`, title: [each.form.name, ...each.form.params].join("\n") }, columns.map((column) =>
    el("span", { role: "gridcell", class: `${column.right ? "right" : ""} col-${column.key}${column.key === "exposed" && each.exposed ? " exposed-text" : ""}`,
      style: column.key === "exposed" && each.time ? { "--share": `${100 * Math.min(1, each.exposed / each.time)}%` } : {} }, column.text(each))));
}
