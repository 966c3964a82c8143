/* What the page is drawn with: elements, words for figures, tables, bars, charts.

   Consumes    figures of the snapshot
   Produces    elements
   Waits for   nothing
   Invariant   all text is set as text, never as markup; what is not known is "-", never 0 */
"use strict";

const SVG = new Set(["svg", "path", "line", "rect", "circle", "text", "title"]);
const at = id => document.getElementById(id);
const known = value => value !== null && value !== undefined;

function make(tag, attributes = {}, ...children) {
  const node = SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children.filter(known));
  return node;
}

const heading = text => make("h2", {}, text);
const strong = text => make("b", {}, text);
const soft = (...children) => make("p", {class: "soft"}, ...children);

// ---- words for figures
const figure = (value, digits = 1) => known(value) ? value.toFixed(digits) : "-";
const percent = (value, digits = 0) => known(value) ? `${figure(100 * value, digits)}%` : "-";
const seconds = value => !known(value) ? "-" : value < 1 ? `${figure(1000 * value, 0)} ms` : `${figure(value, 2)} s`;
const clock = unix_s => new Date(1000 * unix_s).toLocaleTimeString([], {hour12: false});

function plain(value) { // a setting, or a figure whose size is not known beforehand
  if (!known(value)) return "(default)";
  return typeof value !== "number" || Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(3)));
}

function span(value) {
  if (!known(value)) return "-";
  const total = Math.round(value), minutes = Math.floor(total / 60);
  if (minutes >= 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return minutes ? `${minutes} min ${total % 60} s` : `${total} s`;
}

function times(one) {
  if (!one) return "-";
  return `mean ${seconds(one.mean_s)}, p50 ${seconds(one.p50_s)}, p95 ${seconds(one.p95_s)}, of ${one.count}`;
}

// ---- tables and bars
function table(head, rows) { // "#" before a column's name: figures. A row: cells, or {cells, attribute: value, ...}
  const kinds = head.map(name => name.startsWith("#") ? "n" : "");
  const cell = (tag, content, kind) => // of a cell: text, an element, or [either, its class]
    Array.isArray(content) ? make(tag, {class: content[1]}, content[0]) : make(tag, {class: kind}, content);
  const line = (tag, cells, attributes = {}) =>
    make("tr", attributes, ...cells.map((content, column) => cell(tag, content, kinds[column])));
  const body = rows.map(row => Array.isArray(row) ? {cells: row} : row);
  return make("table", {}, make("thead", {}, line("th", head.map(name => name.replace("#", "")))),
    make("tbody", {}, ...body.map(({cells, ...attributes}) => line("td", cells, attributes))));
}

const pairs = figures => table(["", "#"], Object.entries(figures));

function bar(parts) { // [[class, share of the whole, title], ...]
  return make("div", {class: "bar"}, ...parts.filter(([, share]) => share > 0).map(([kind, share, title]) => {
    const part = make("i", {class: kind, title: title ?? ""});
    part.style.width = `${100 * Math.min(1, share)}%`;
    return part;
  }));
}

const legend = parts => // [[class, words], ...]
  make("p", {}, ...parts.map(([kind, words]) => make("span", {class: "key"}, make("i", {class: kind}), words)));

// ---- charts
const WIDE = 170, HIGH = 72, TOP = 14, EDGE = 3;

function chart({name, unit, values}, bound) { // a figure over steps, with the bound it must not pass
  const least = Math.min(...values), most = Math.max(...values, bound ?? -Infinity);
  const low = least >= 0 && least < most / 2 ? 0 : least - (most - least) / 10;
  const x = index => EDGE + index * (WIDE - 2 * EDGE) / Math.max(1, values.length - 1);
  const y = value => HIGH - (HIGH - TOP) * (value - low) / (most - low || 1);
  const line = values.map((value, index) => `${x(index).toFixed(1)},${y(value).toFixed(1)}`).join("L");
  const last = values.length - 1;
  const words = `${name}, ${unit}: ${values.map(plain).join(", ")}`;
  const drawing = make("svg", {viewBox: `0 0 ${WIDE} ${HIGH + 12}`, role: "img", "aria-label": words},
    make("line", {class: "rule", x1: 0, x2: WIDE, y1: HIGH, y2: HIGH}),
    known(bound) ? make("line", {class: "bound", x1: 0, x2: WIDE, y1: y(bound), y2: y(bound)}) : null,
    make("path", {class: "area", d: `M${x(0)},${HIGH}L${line}L${x(last)},${HIGH}Z`}),
    make("path", {class: "curve", d: `M${line}`}),
    ...values.map((value, index) => make("circle",
      {class: "dot", cx: x(index), cy: y(value), r: index === last ? 3 : 1.5}, make("title", {}, plain(value)))),
    make("text", {x: 0, y: TOP - 4}, plain(most)), make("text", {x: 0, y: HIGH + 11}, plain(low)));
  return make("figure", {"data-chart": name},
    make("figcaption", {}, strong(name), make("span", {class: "soft"}, ` ${unit}`), make("br"),
      make("span", {class: "soft"}, `${plain(values[0])} to `), strong(plain(values[last]))), drawing);
}

function histogram(counts, bound) { // tokens by age; what is older than the bound stands out
  const total = Object.values(counts).reduce((sum, count) => sum + count, 0) || 1;
  const num_ages = 1 + Math.max(bound, ...Object.keys(counts).map(Number));
  const wide = Math.min(64, 300 / num_ages), end = wide * (bound + 1) + 1;
  const columns = Array.from({length: num_ages}, (_, age) => {
    const share = (counts[age] ?? 0) / total, tall = share && Math.max(1, 54 * share), x = age * wide;
    return [
      make("rect", {class: age > bound ? "column over" : "column", x, y: 68 - tall, width: wide - 4, height: tall}),
      make("text", {class: "strong", x, y: 64 - tall}, share ? percent(share) : ""),
      make("text", {x, y: 80}, String(age))];
  });
  const words = `tokens by age: ${JSON.stringify(counts)}; the bound is ${bound}`;
  return make("svg", {viewBox: "0 0 360 82", role: "img", "aria-label": words},
    make("line", {class: "rule", x1: 0, x2: 360, y1: 68, y2: 68}), ...columns.flat(),
    make("line", {class: "bound", x1: end, x2: end, y1: 6, y2: 68}),
    make("text", {x: end + 5, y: 13}, `bound S = ${bound}`));
}
