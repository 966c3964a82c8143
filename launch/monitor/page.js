/* The page of `rocstar monitor RUN --web`.

   Consumes    /snapshot.json once a second: launch/monitor/snapshot.py, with the advice of advisor.py
   Produces    the page's parts; a drill-down when one is asked for
   Waits for   answers; while nobody sees the page it asks nothing
   Invariant   no figure is computed here: what the snapshot says only gets a shape; what is not known is "-", never 0;
               all text of a run is set as text, never as markup */
"use strict";
// ---- small tools
const SVG = new Set(["svg", "path", "line", "rect", "circle", "text", "title"]);
const at = id => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const node = SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "width" && tag === "i") node.style.width = value; // the policy allows no style attributes
    else node.setAttribute(key, value);
  }
  node.append(...children.filter(child => child !== null && child !== undefined));
  return node;
}

const known = value => value !== null && value !== undefined;
const plain = value => typeof value !== "number" ? String(value ?? "(default)") : Number.isInteger(value) ? String(value)
  : String(Number(value.toPrecision(3)));
const figure = (value, digits = 1, unit = "") => known(value) ? value.toFixed(digits) + unit : "-";
const percent = (value, digits = 0) => known(value) ? (100 * value).toFixed(digits) + "%" : "-";
const seconds = value => !known(value) ? "-" : value < 1 ? (1000 * value).toFixed(0) + " ms" : value.toFixed(2) + " s";

function span(value) {
  if (!known(value)) return "-";
  const total = Math.round(value), hours = Math.floor(total / 3600), minutes = Math.floor(total / 60) % 60;
  return hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min ${total % 60} s` : `${total} s`;
}

const heading = text => make("h2", {}, text);
const soft = (...children) => make("p", {class: "soft"}, ...children);

function table(head, rows) { // a row is [cells] or {cells, ...attributes}; a cell is text, a node, or [text, class]
  const cell = (tag, content, column) => {
    const [inside, kind] = Array.isArray(content) ? content : [content, typeof head[column] === "string" ? "" : "n"];
    return make(tag, {class: kind}, inside);
  };
  const line = ({cells, ...attributes}) => make("tr", attributes, ...cells.map((one, column) => cell("td", one, column)));
  return make("table", {},
    make("thead", {}, make("tr", {}, ...head.map((one, column) => cell("th", Array.isArray(one) ? one[0] : one, column)))),
    make("tbody", {}, ...rows.map(row => line(Array.isArray(row) ? {cells: row} : row))));
}

const pairs = figures => table(["", [""]], Object.entries(figures)); // name and figure

function bar(parts) { // {class or [class, title]: share of the whole}
  return make("div", {class: "bar"},
    ...parts.filter(([, share]) => share > 0).map(([kind, share, title]) =>
      make("i", {class: kind, title: title ?? "", width: 100 * Math.min(1, share) + "%"})));
}

const keys = parts => make("p", {}, ...parts.map(([kind, text]) => make("span", {class: "key"}, make("i", {class: kind}), text)));

const drawn = {}; // what each part was drawn from: a part that did not change is left alone, so is what points at it

function draw(id, from, ...parts) {
  const text = JSON.stringify(from);
  if (drawn[id] === text) return;
  drawn[id] = text;
  at(id).replaceChildren(...parts.flatMap(part => part()).filter(known));
}
// ---- charts
const WIDE = 170, HIGH = 72, TOP = 14, LEFT = 2;

function path(points, low, high, width = WIDE) {
  const x = index => LEFT + index * (width - 2 * LEFT - 4) / Math.max(1, points.length - 1);
  const y = value => HIGH - (HIGH - TOP) * (value - low) / (high - low || 1);
  return points.map((value, index) => [x(index), y(value)]);
}

function chart({name, unit, values}, bound) {
  const least = Math.min(...values), most = Math.max(...values, bound ?? -Infinity);
  const low = Math.min(0, least) === 0 && least < most / 2 ? 0 : least - (most - least) * .1, high = most;
  const points = path(values, low, high), line = points.map(point => point.map(one => one.toFixed(1)).join(",")).join("L");
  const last = points.at(-1), limit = known(bound) && path([bound], low, high)[0][1];
  const box = make("svg", {viewBox: `0 0 ${WIDE} ${HIGH + 12}`, role: "img", "aria-label": `${name}: ${values.map(plain)}`},
    make("line", {class: "rule", x1: 0, x2: WIDE, y1: HIGH, y2: HIGH}),
    limit === false ? null : make("line", {class: "bound", x1: 0, x2: WIDE, y1: limit, y2: limit}),
    make("path", {class: "area", d: `M${points[0][0]},${HIGH}L${line}L${last[0]},${HIGH}Z`}),
    make("path", {class: "curve", d: `M${line}`}),
    ...points.map(([x, y], index) => make("circle", {class: "dot", cx: x, cy: y, r: index === points.length - 1 ? 3 : 1.6},
      make("title", {}, plain(values[index])))),
    make("text", {x: 0, y: TOP - 4}, plain(high)), make("text", {x: 0, y: HIGH + 11}, plain(low)));
  return make("figure", {"data-chart": name},
    make("figcaption", {}, make("b", {}, name), make("span", {class: "soft"}, ` ${unit}`), make("br"),
      make("span", {class: "soft"}, `${plain(values[0])} to `), make("b", {}, plain(values.at(-1)))), box);
}

function histogram({histogram: counts, max_staleness: bound}) {
  const total = Object.values(counts).reduce((sum, one) => sum + one, 0) || 1;
  const ages = Array.from({length: 1 + Math.max(bound, ...Object.keys(counts).map(Number))}, (_, age) => age);
  const wide = Math.min(64, 300 / ages.length), end = wide * (bound + 1) + 3;
  const columns = ages.flatMap(age => {
    const share = (counts[age] ?? 0) / total, tall = share && Math.max(1, share * 54), x = age * wide;
    return [make("rect", {class: age > bound ? "column over" : "column", x: x + 2, y: 68 - tall, width: wide - 6, height: tall}),
      make("text", {class: "strong", x: x + 2, y: 64 - tall}, counts[age] ? percent(share) : ""),
      make("text", {x: x + 2, y: 79}, String(age))];
  });
  return make("svg", {viewBox: "0 0 360 82", role: "img", "aria-label": `ages ${JSON.stringify(counts)}, bound ${bound}`},
    make("line", {class: "rule", x1: 0, x2: 360, y1: 68, y2: 68}), ...columns,
    make("line", {class: "bound", x1: end, x2: end, y1: 6, y2: 68}), make("text", {x: end + 5, y: 13}, `bound S = ${bound}`));
}
// ---- the page's parts
const STATES = {running: ["live", "live"], evaluating: ["live", "live: an evaluation goes on"], done: ["good", "finished"],
  reached: ["good", "finished: its goal is reached"], interrupted: ["bad", "interrupted, can be resumed"],
  failed: ["bad", "failed"], stopped: ["bad", "stopped: nobody drives it"], empty: ["", "empty: no figures yet"]};
const CLOCK = {busy: "busy", starved: "waits for input", blocked: "waits for room or the disk", sync: "exchanges weights",
  down: "starts or recovers"};
const TICKET = {waiting: "starved", leased: "busy", finished: "sync", taken: "blocked"};
const DROP = ["starved", "blocked", "sync", "down"];
const FAR = 20; // what could do so many times more is no matter

function head({run, window}) {
  const [kind, words] = STATES[run.state] ?? ["", run.state];
  document.title = `${run.name}: step ${run.step} of ${run.steps}`;
  at("name").textContent = run.name;
  at("state").className = `pill ${kind}`;
  at("state").textContent = words;
  const parts = [`step ${run.step} of ${run.steps}`, `version ${run.acked}`, span(run.wall_s),
    known(run.step_s) && `${figure(run.step_s)} s per step`, known(run.eta_s) && `${span(run.eta_s)} to go`,
    known(window.ends_unix_s) && `rates over ${window.what}, up to ${new Date(1000 * window.ends_unix_s).toLocaleTimeString()}`];
  at("progress").textContent = run.state === "empty" ? "" : parts.filter(Boolean).join("  /  ");
}

function verdict({advice, run}) {
  at("verdict").className = ["unclear", "balanced"].includes(advice.limit) ? "calm" : "";
  const fixes = advice.fixes.map(fix => [[fix.dial, "mono name"], plain(fix.now), plain(fix.proposed), fix.expect, fix.reason]);
  return [run.reason && soft(`ended: ${run.reason}`), heading("Verdict"), make("p", {class: "big"}, advice.verdict),
    ...advice.reasons.slice(1, 3).map(reason => soft(reason)),
    fixes.length ? table(["What to turn", "now", "to", "expected", "because"], fixes) : null];
}

function flow({advice, rates}) {
  const rate = rates.groups_trained_per_min;
  const rows = advice.capacities.filter(one => one.use !== 0).map(one => {
    const limits = one.stage === advice.limit, could = one.groups_per_min;
    return {"data-view": VIEW_OF[one.stage] ?? "", class: limits ? "limit" : "", cells: [[limits ? `${one.stage}, the limit` : one.stage, "name"],
      [bar([[limits ? "hot" : "busy", one.use]]), "wide"], percent(one.use),
      rate && could > FAR * rate ? `> ${FAR}x` : figure(could, 0), one.says]};
  });
  return [heading("Flow, in groups per minute"),
    make("p", {class: "row"}, make("span", {}, make("b", {}, figure(rate)), " trained"),
      make("span", {}, make("b", {}, figure(rates.groups_decided_per_min)), " decided"),
      make("span", {}, make("b", {}, figure(rates.tokens_generated_per_s, 0)), " tokens/s generated")),
    table(["Stage", "in use", [""], ["could do"], "what that rests on"], rows)];
}

function roles({roles, hosts}) {
  const rows = roles.map(one => [[one.name, "name"], [bar(Object.entries(one.shares).map(([state, share]) =>
    [state, share, `${CLOCK[state]}: ${percent(share, 1)}`])), "wide"], figure(one.cores_used, 2),
    one.state !== "alive" ? [`${one.state} ${one.error}`, "error"] : one.waits_for && `waits for ${one.waits_for}`]);
  const used = hosts.map(one => `${one.name}: ${figure(one.run_used)} of ${one.cores} cores`).join("; ");
  return [heading("Roles"), keys(Object.entries(CLOCK)), table(["Role", "its time", ["cores"], used], rows)];
}

function tickets({tickets: one}) {
  const states = Object.entries(one.by_state);
  return [heading("Tickets"), make("p", {}, make("b", {}, `${one.active} of ${one.bound}`), " = (S + 1) P active"),
    bar(states.map(([state, count]) => [TICKET[state], count / one.bound, `${state}: ${count}`])),
    keys(states.map(([state, count]) => [TICKET[state], `${state} ${count}`])),
    one.waits_for && soft(`A ticket waits for ${one.waits_for}.`), one.batch_waits_for && soft(`${one.batch_waits_for}.`)];
}

function ages({staleness: one}) {
  return [heading("Age of tokens when trained, in steps"), histogram(one), make("p", {class: "soft"},
    `mean ${figure(one.mean, 2)} = in flight ${figure(one.in_flight, 2)} + in queue ${figure(one.in_queue, 2)}; ` +
    `oldest ever ${one.max}; turns of several versions ${percent(one.mixed_turns)}`)];
}

function useful({useful: one, rates}) {
  const dropped = Object.entries(one.dropped).map(([reason, share], index) =>
    [DROP[index % DROP.length], share, `${reason.replaceAll("_", " ")} ${percent(share, 1)}`]);
  const parts = [["busy", one.kept, `kept ${percent(one.kept)} of ${one.groups} groups`], ...dropped];
  return [heading("Useful work"), bar(parts), keys(parts.map(([kind, , words]) => [kind, words])), soft(
    `trained ${figure(rates.tokens_trained_per_s, 0)} of ${figure(rates.tokens_generated_per_s, 0)} tokens/s; ` +
    `reward ${figure(one.reward, 2)}; failed calls ${percent(one.tool_error)}; tools ${percent(one.tool_wait)} of a rollout's life`)];
}

function alerts({alerts, dials}) {
  return [heading("Alerts"), ...alerts.map(one => make("p", {}, make("b", {class: one.level}, one.level), ` ${one.text}`)),
    alerts.length ? null : soft("none"),
    ...dials.map(one => soft(make("span", {class: "mono"}, one.name), ` turned to ${plain(one.value)} from step ${one.step} on`))];
}

function trend({trend, staleness}) {
  const charts = trend.filter(one => one.values.length).map(one => chart(one, one.name === "age" ? staleness?.max_staleness : null));
  return [heading("Last half hour, by step"), charts.length ? make("div", {id: "charts"}, ...charts) : soft("no step is trained yet")];
}
// ---- drill-downs
const times = one => one ? `mean ${seconds(one.mean_s)}, p50 ${seconds(one.p50_s)}, p95 ${seconds(one.p95_s)}, of ${one.count}` : "-";
const VIEW_OF = {engines: "engines", slots: "engines", kv: "engines", sandbox: "sandbox", learner: "learner", swap: "weights"};
const VIEWS = {
  engines: ({engines}) => engines.flatMap(one => [heading(one.name), pairs({
    "version loaded": plain(one.version ?? "-"), "tokens/s": `${figure(one.tokens_per_s, 0)}, at best ${figure(one.capacity_tokens_per_s, 0)}`,
    "rollouts in hand": `${figure(one.held)} of ${one.slots} slots`, "no room left": percent(one.full),
    "generations at once": figure(one.generating), "queued in the engine": figure(one.waiting), "KV cache in use": percent(one.kv_use),
    "without a rollout": percent(one.starved, 1), "loads weights": percent(one.paused, 1)}),
    soft("Tokens/s against generations at once, as measured", one.rising ? "; the curve still rises" : ""),
    one.curve.length ? table([["at once"], "", ["tokens/s"], ["seconds"]], one.curve.map(point => [String(point.concurrency),
      [bar([["busy", point.tokens_per_s / one.capacity_tokens_per_s]]), "wide"], figure(point.tokens_per_s, 0), figure(point.seconds)])) : null]),
  sandbox: ({sandbox: one}) => one ? [heading("Sandbox"), pairs({nodes: one.nodes, workers: one.workers, "calls/s": figure(one.calls_per_s),
    "calls waiting": figure(one.waiting), "time with a call waiting for each worker": percent(one.backlog), "wait in the queue": times(one.queue),
    "a call runs for": times(one.run), "cores in use per worker": percent(one.cpu_use), "calls that time out": percent(one.timeouts, 1),
    "calls refused": one.refused})] : [],
  learner: ({learner: one}) => one ? [heading(`A step, mean of ${one.steps}`), pairs(Object.fromEntries(Object.entries(one.parts_s).map(
    ([part, value]) => [part, seconds(value)]))), soft(`train: ${times(one.train)}; ${figure(one.tokens_per_s, 0)} tokens/s`),
    heading("The newest step"), pairs(Object.fromEntries(Object.entries(one.figures).map(([name, value]) => [name, plain(value)])))] : [],
  weights: ({swap: one, engines, run}) => one ? [heading("From a version to engines that use it"), pairs({swaps: one.swaps,
    "publishing, per step": seconds(one.publish_s), "receiving, while it generates": seconds(one.receive_s), "pausing, per swap": seconds(one.pause_s),
    "share of the engines' time": percent(one.paused, 1), "until all had it": times(one.lag), "versions behind": figure(one.lag_steps, 2)}),
    heading(`Engines; version ${run.published} is published`), table(["Engine", ["version"], ["pauses"]],
      engines.map(one => [one.name, plain(one.version ?? "-"), percent(one.paused, 1)]))] : [],
  settings: ({settings, dials}) => [heading("Settings"), pairs(Object.fromEntries(Object.entries(settings).map(([name, value]) =>
    [dials.some(dial => dial.name === name) ? `${name} (turned)` : name, plain(value)])))],
};
let told = null;

function open(view) {
  const now = view in VIEWS && view !== at("drill").dataset.view ? view : "";
  at("drill").dataset.view = now;
  at("drill").hidden = !now;
  for (const button of at("views").children) button.setAttribute("aria-expanded", button.dataset.view === now);
  history.replaceState(null, "", now ? `#${now}` : location.pathname);
  if (now && told) drill();
}

function drill() {
  const view = at("drill").dataset.view, nodes = view ? VIEWS[view](told) : [];
  draw("view", [view, told], () => nodes.length ? nodes : [soft("nothing was measured yet")]);
}
// ---- asking
function show() {
  const empty = !told.roles.length;
  head(told);
  at("empty").hidden = !empty;
  for (const id of ["work", "side"]) at(id).hidden = empty;
  if (empty) draw("empty", told.run, () => [heading("Nothing was measured yet"), make("p", {},
    "The directory's metrics/ is empty: a run writes there once its buffer has started. This page goes on looking.")]);
  draw("verdict", [told.advice, told.run.reason], () => verdict(told));
  if (!empty) {
    draw("flow", [told.advice, told.rates, told.roles, told.hosts], () => flow(told), () => roles(told));
    draw("tickets", told.tickets, () => told.tickets ? tickets(told) : []);
    draw("ages", told.staleness, () => told.staleness ? ages(told) : []);
    draw("useful", [told.useful, told.rates], () => told.useful ? useful(told) : []);
    draw("alerts", [told.alerts, told.dials], () => alerts(told));
    draw("trend", [told.trend, told.staleness?.max_staleness], () => trend(told));
  }
  drill();
}

async function ask() {
  try {
    const answer = await fetch("snapshot.json"), news = await answer.json();
    if (news.error) throw new Error(news.error);
    told = news;
    show();
    at("lost").hidden = true;
  } catch (error) {
    at("lost").textContent = `No news: ${error.message}. What is shown is as it was; the page goes on asking.`;
    at("lost").hidden = false;
  }
  if (document.hidden) document.addEventListener("visibilitychange", ask, {once: true});
  else setTimeout(ask, 1000);
}

Object.keys(VIEWS).forEach((view, index) => at("views").append(make("button", {"data-view": view, "aria-expanded": false,
  "aria-controls": "drill", title: `key ${index + 1}`}, view)));
document.addEventListener("click", event => {
  const view = event.target.closest("[data-view]:not(aside)")?.dataset.view;
  if (view) open(view);
});
at("close").addEventListener("click", () => open(""));
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") open("");
  if (/^[1-9]$/.test(event.key)) open(Object.keys(VIEWS)[event.key - 1]);
});
open(location.hash.slice(1));
ask();
