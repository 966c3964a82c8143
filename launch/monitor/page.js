/* The page of `rocstar monitor RUN --web`.

   Consumes    /snapshot.json once a second: launch/monitor/snapshot.py, with the advice of advisor.py
   Produces    the page's parts, and a drill-down when one is asked for
   Waits for   answers; while nobody sees the page it asks nothing
   Invariant   no figure is computed here: what the snapshot says only gets a shape. A part whose figures have not
               changed is left alone, and so is what points at it */

const STATES = { // of a run: how it looks, and the words for it
  running: ["live", "live"], evaluating: ["live", "live: an evaluation goes on"], done: ["good", "finished"],
  reached: ["good", "finished: its goal is reached"], interrupted: ["bad", "interrupted, can be resumed"],
  failed: ["bad", "failed"], stopped: ["bad", "stopped: nobody drives it"], empty: ["", "empty: no figures yet"],
};
const TIME = { // of a role's clock
  busy: "busy", starved: "waits for input", blocked: "waits for room or the disk", sync: "exchanges weights",
  down: "starts or recovers",
};
const TICKET = {waiting: "starved", leased: "busy", finished: "sync", taken: "blocked"};
const DROPPED = ["starved", "blocked", "sync", "down"];
const FAR = 20; // a stage that could do so many times more is no matter

// ---- the page's parts
function head({run, window}) {
  const [kind, words] = STATES[run.state] ?? ["", run.state];
  document.title = `${run.name}: step ${run.step} of ${run.steps}`;
  at("name").textContent = run.name;
  at("state").className = `pill ${kind}`;
  at("state").textContent = words;
  const parts = [
    `step ${run.step} of ${run.steps}`, `version ${run.acked}`, span(run.wall_s),
    known(run.step_s) && `${figure(run.step_s)} s per step`, known(run.eta_s) && `${span(run.eta_s)} to go`,
    known(window.ends_unix_s) && `rates over ${window.what}, up to ${clock(window.ends_unix_s)}`];
  at("progress").textContent = run.state === "empty" ? "" : parts.filter(Boolean).join("  /  ");
}

function verdict({advice, run}) {
  at("verdict").className = ["unclear", "balanced"].includes(advice.limit) ? "calm" : "";
  const fixes = advice.fixes.map(fix =>
    [[fix.dial, "mono name"], plain(fix.now), plain(fix.proposed), fix.expect, fix.reason]);
  return [
    run.reason ? soft(`ended: ${run.reason}`) : null, heading("Verdict"), make("p", {class: "big"}, advice.verdict),
    ...advice.reasons.slice(1, 3).map(reason => soft(reason)),
    fixes.length ? table(["What to turn", "now", "to", "expected", "because"], fixes) : null];
}

function flow({advice, rates}) {
  const rate = rates.groups_trained_per_min;
  const rows = advice.capacities.filter(one => one.use !== 0).map(one => {
    const limits = one.stage === advice.limit, could = one.groups_per_min;
    return {"data-view": VIEW_OF[one.stage] ?? "", class: limits ? "limit" : "", cells: [
      [limits ? `${one.stage}, the limit` : one.stage, "name"], [bar([[limits ? "hot" : "busy", one.use]]), "wide"],
      percent(one.use), rate && could > FAR * rate ? `> ${FAR}x` : figure(could, 0), one.says]};
  });
  return [
    heading("Flow, in groups per minute"),
    make("p", {class: "row"},
      make("span", {}, strong(figure(rate)), " trained"),
      make("span", {}, strong(figure(rates.groups_decided_per_min)), " decided"),
      make("span", {}, strong(figure(rates.tokens_generated_per_s, 0)), " tokens/s generated")),
    table(["Stage", "in use", "#", "#could do", "what that rests on"], rows)];
}

function roles({roles, hosts}) {
  const rows = roles.map(one => {
    const shares = Object.entries(one.shares).map(([state, share]) =>
      [state, share, `${TIME[state]}: ${percent(share, 1)}`]);
    const waits = one.waits_for && `waits for ${one.waits_for}`;
    const says = one.state === "alive" ? waits : [`${one.state} ${one.error}`, "error"];
    return [[one.name, "name"], [bar(shares), "wide"], figure(one.cores_used, 2), says];
  });
  const used = hosts.map(one => `${one.name}: ${figure(one.run_used)} of ${one.cores} cores`).join("; ");
  return [heading("Roles"), legend(Object.entries(TIME)), table(["Role", "its time", "#cores", used], rows)];
}

function waits(one) {
  const ticket = one.waits_for && `Issuing waits for ${one.waits_for}.`;
  const batch = one.batch_waits_for && `${one.batch_waits_for[0].toUpperCase()}${one.batch_waits_for.slice(1)}.`;
  return [ticket, batch].filter(Boolean).map(words => soft(words));
}

function tickets(one) {
  const states = Object.entries(one.by_state);
  return [
    heading("Tickets"), make("p", {}, strong(`${one.active} of ${one.bound}`), " = (S + 1) P active"),
    bar(states.map(([state, count]) => [TICKET[state], count / one.bound, `${state}: ${count}`])),
    legend(states.map(([state, count]) => [TICKET[state], `${state} ${count}`])), ...waits(one)];
}

function ages(one) {
  return [
    heading("Age of tokens when trained, in steps"), histogram(one.histogram, one.max_staleness),
    soft(`mean ${figure(one.mean, 2)} = in flight ${figure(one.in_flight, 2)} + in queue ${figure(one.in_queue, 2)}; `,
      `oldest ever ${one.max}; turns of several versions ${percent(one.mixed_turns)}`)];
}

function useful(one, rates) {
  const dropped = Object.entries(one.dropped).map(([reason, share], index) =>
    [DROPPED[index % DROPPED.length], share, `${reason.replaceAll("_", " ")} ${percent(share, 1)}`]);
  const parts = [["busy", one.kept, `kept ${percent(one.kept)} of ${one.groups} groups`], ...dropped];
  return [
    heading("Useful work"), bar(parts), legend(parts.map(([kind, , words]) => [kind, words])),
    soft(`trained ${figure(rates.tokens_trained_per_s, 0)} of ${figure(rates.tokens_generated_per_s, 0)} tokens/s; `,
      `reward ${figure(one.reward, 2)}; failed calls ${percent(one.tool_error)}; `,
      `tools ${percent(one.tool_wait)} of a rollout's life`)];
}

function alerts({alerts, dials}) {
  return [
    heading("Alerts"), ...alerts.map(one => make("p", {}, make("b", {class: one.level}, one.level), ` ${one.text}`)),
    alerts.length ? null : soft("none"),
    ...dials.map(one =>
      soft(make("span", {class: "mono"}, one.name), ` is ${plain(one.value)} from step ${one.step} on`))];
}

function trend({trend, staleness}) {
  const charts = trend.filter(one => one.values.length)
    .map(one => chart(one, one.name === "age" ? staleness?.max_staleness : null));
  return [
    heading("Last half hour, by step"),
    charts.length ? make("div", {id: "charts"}, ...charts) : soft("no step is trained yet")];
}

function nothing() {
  return [heading("Nothing was measured yet"), make("p", {},
    "The directory's metrics/ is empty: a run writes there once its buffer has started. This page goes on looking.")];
}

// ---- drawing
const drawn = {};
let told = null;

function draw(id, figures, parts) {
  const text = JSON.stringify(figures);
  if (drawn[id] === text) return;
  drawn[id] = text;
  at(id).replaceChildren(...parts().filter(known));
}

function show() {
  const empty = !told.roles.length;
  head(told);
  at("verdict").hidden = empty && !told.run.reason;
  at("empty").hidden = !empty;
  for (const id of ["work", "side"]) at(id).hidden = empty;
  draw("empty", "", nothing);
  draw("verdict", [told.advice, told.run.reason], () => verdict(told));
  draw("flow", [told.advice, told.rates, told.roles, told.hosts], () => [...flow(told), ...roles(told)]);
  draw("tickets", told.tickets, () => told.tickets ? tickets(told.tickets) : []);
  draw("ages", told.staleness, () => told.staleness ? ages(told.staleness) : []);
  draw("useful", [told.useful, told.rates], () => told.useful ? useful(told.useful, told.rates) : []);
  draw("alerts", [told.alerts, told.dials], () => alerts(told));
  draw("trend", [told.trend, told.staleness?.max_staleness], () => trend(told));
  drill();
}

// ---- drill-downs
let records = null, which = ""; // of the open view: what is recorded, and of which one

function open(view, asked = "") { // the one that is open already, or none: closes
  const now = view in VIEWS && (asked || view !== at("drill").dataset.view) ? view : "";
  records = null;
  which = asked;
  at("drill").dataset.view = now;
  at("drill").hidden = !now;
  for (const button of at("views").children) button.setAttribute("aria-expanded", button.dataset.view === now);
  history.replaceState(null, "", now ? `#${now}` : location.pathname);
  if (told) news().catch(lost);
}

function drill() {
  const view = at("drill").dataset.view;
  if (!view) return;
  draw("view", [view, told], () => VIEWS[view](told));
  draw("records", [view, records], () =>
    records?.none ? [soft(records.none)] : records ? RECORDED[view](records) : []);
}

// ---- asking
async function get(address) {
  const answer = await fetch(address), found = await answer.json();
  if (found.error) throw new Error(found.error);
  return found;
}

async function news() {
  const view = at("drill").dataset.view;
  told = await get("snapshot.json");
  show();
  at("lost").hidden = true;
  if (!(view in RECORDED)) return;
  const found = await get(`records.json?view=${view}${which}`);
  if (view !== at("drill").dataset.view) return;
  if ("group" in found) which = `&group=${found.group}&rollout=${found.rollout}`;
  records = found;
  drill();
}

function lost(error) {
  at("lost").textContent = `No news: ${error.message}. What is shown is as it was; the page goes on asking.`;
  at("lost").hidden = false;
}

async function ask() {
  await news().catch(lost);
  if (document.hidden) document.addEventListener("visibilitychange", ask, {once: true});
  else setTimeout(ask, 1000);
}

Object.keys(VIEWS).forEach((view, index) => at("views").append(make("button",
  {"data-view": view, "aria-expanded": false, "aria-controls": "drill", title: `key ${index + 1}`}, view)));
document.addEventListener("click", event => {
  const {view, group, rollout, move} = event.target.closest("button, tr")?.dataset ?? {};
  if (view) open(view);
  if (group) open("trajectory", `&group=${group}&rollout=${rollout ?? 0}`);
  if (move) open("trajectory", `${which}&move=${move}`);
});
at("close").addEventListener("click", () => open(""));
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") open("");
  if (/^[1-9]$/.test(event.key)) open(Object.keys(VIEWS)[event.key - 1]);
});
open(location.hash.slice(1));
ask();
