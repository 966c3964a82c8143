/* The drill-downs: what there is to know of one stage.

   Consumes    the snapshot
   Produces    elements, by the name of the view
   Waits for   nothing
   Invariant   no figure is computed here */

const VIEW_OF = { // the view that a row of the flow opens
  engines: "engines", slots: "engines", kv: "engines", sandbox: "sandbox", filter: "groups", buffer: "groups",
  tickets: "groups", learner: "learner", swap: "weights",
};

function engine(one) {
  const curve = one.curve.map(point => [String(point.concurrency),
    [bar([["busy", point.tokens_per_s / one.capacity_tokens_per_s]]), "wide"],
    figure(point.tokens_per_s, 0), figure(point.seconds)]);
  return [
    heading(one.name),
    pairs({
      "version loaded": known(one.version) ? one.version : "-",
      "tokens/s": `${figure(one.tokens_per_s, 0)}, at best ${figure(one.capacity_tokens_per_s, 0)}`,
      "rollouts in hand": `${figure(one.held)} of ${one.slots} slots`,
      "time without room for one more": percent(one.full),
      "time without any": percent(one.starved, 1),
      "generations at once": figure(one.generating),
      "requests queued inside": figure(one.waiting),
      "KV cache in use": percent(one.kv_use),
      "time in which it loads weights": percent(one.paused, 1),
    }),
    soft("Speed against generations at once, as measured", one.rising ? "; it still rises" : ""),
    curve.length ? table(["at once", "", "#tokens/s", "#seconds measured"], curve) : soft("not measured yet"),
  ];
}

function sandbox(one) {
  return [heading("Sandbox"), pairs({
    nodes: one.nodes,
    workers: one.workers,
    "calls/s": figure(one.calls_per_s),
    "calls waiting": figure(one.waiting),
    "time with a call waiting for each worker": percent(one.backlog),
    "a call waits": times(one.queue),
    "a call runs": times(one.run),
    "cores in use, of one per worker": percent(one.cpu_use),
    "calls that time out": percent(one.timeouts, 1),
    "calls refused": one.refused,
  })];
}

function groups(tickets, store) {
  return [
    heading(`Tickets, at most ${tickets.bound} = (S + 1) P`),
    pairs({
      ...tickets.by_state,
      "active, mean": figure(tickets.active_mean),
      "not leased yet, mean": figure(tickets.waiting_mean),
      "finished and not taken, mean": figure(tickets.finished_mean),
    }),
    ...waits(tickets),
    heading("The buffer's disk"),
    pairs({
      "a commit takes": times(store?.commit),
      "time in which the buffer waits for it": percent(store?.disk_wait, 1),
      "MiB/s": figure(store?.mib_per_s, 2),
      ...store?.refused,
    }),
  ];
}

function step(one) {
  const longest = Math.max(...Object.values(one.parts_s));
  const parts = Object.entries(one.parts_s).map(([part, value]) =>
    [part, [bar([["busy", value / longest]]), "wide"], seconds(value)]);
  const figures = Object.entries(one.figures).map(([name, value]) => [name, plain(value)]);
  return [
    heading(`A step's parts, mean of ${one.steps} steps`), table(["Part", "", "#"], parts),
    soft(`train: ${times(one.train)}; ${figure(one.tokens_per_s, 0)} tokens/s meanwhile`),
    heading("The newest step"), table(["", "#"], figures),
  ];
}

function weights(swap, engines, run) {
  const loaded = engines.map(one => [one.name, known(one.version) ? plain(one.version) : "-", percent(one.paused, 1)]);
  return [
    heading("From a version to engines that use it"),
    pairs({
      swaps: swap.swaps,
      "publishing, per step": seconds(swap.publish_s),
      "receiving, while the engine generates": seconds(swap.receive_s),
      "pausing, per swap": seconds(swap.pause_s),
      "engines' time in pauses": percent(swap.paused, 1),
      "until all engines had it": times(swap.lag),
      "versions behind, mean": figure(swap.lag_steps, 2),
      "slowest engine": swap.slowest || "none is behind",
    }),
    heading(`Engines; version ${run.published} is published`), table(["Engine", "#version", "#time in pauses"], loaded),
  ];
}

function settings(all, dials) {
  const turned = new Set(dials.map(dial => dial.name));
  const rows = Object.entries(all).map(([name, value]) =>
    [[name, "mono"], plain(value), turned.has(name) ? "turned" : ""]);
  return [heading("Settings"), table(["Dial", "#value", ""], rows)];
}

const VIEWS = {
  engines: told => told.engines.flatMap(engine),
  sandbox: told => told.sandbox ? sandbox(told.sandbox) : [],
  groups: told => told.tickets ? groups(told.tickets, told.store) : [],
  learner: told => told.learner ? step(told.learner) : [],
  weights: told => told.swap ? weights(told.swap, told.engines, told.run) : [],
  trajectory: () => [],
  settings: told => settings(told.settings, told.dials),
};
