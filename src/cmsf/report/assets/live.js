// While training goes on, the page looks for a newer one, and comes back as it was left.

const KEPT = `cmsf-report:${location.pathname}`;

function startLive() {
  const bar = byId("live");
  if (!bar) return;
  const button = byId("pause");
  const seconds = Number(bar.dataset.every);
  const say = (paused) => {
    bar.classList.toggle("paused", paused);
    button.setAttribute("aria-pressed", String(paused));
    byId("live-state").textContent = paused
      ? "Training goes on; this page does not look for a newer one."
      : `Training goes on: this page looks for a newer one every ${seconds} seconds.`;
  };
  let paused = recall("sessionStorage", `${KEPT}:paused`) === "yes";
  if (paused) say(paused);
  button.addEventListener("click", () => {
    paused = !paused;
    remember("sessionStorage", `${KEPT}:paused`, paused ? "yes" : "no");
    say(paused);
  });
  setInterval(() => paused || isBusy() || location.reload(), 1000 * seconds);
}

// Whoever writes, walks or moves about on a map is not to be torn away.
function isBusy() {
  return document.hidden || byId("walk").open || Boolean(document.activeElement?.matches("input[type=search], select, canvas"));
}

function startKeeping() {
  history.scrollRestoration = "manual";
  window.addEventListener("pagehide", () => remember("sessionStorage", KEPT, JSON.stringify(asItIs())));
  const reloaded = performance.getEntriesByType("navigation")[0]?.type === "reload";
  const kept = reloaded && recall("sessionStorage", KEPT);
  if (kept) restore(JSON.parse(kept));
}

function asItIs() {
  return {
    fields: all("input[id], select[id]").map((field) => [field.id, field.type === "search" || field.matches("select") ? field.value : field.checked]),
    open: all("details[open]").map((details) => details.id),
    sorts: sorts(),
    maps: maps.map(({ run, centre, magnified }) => ({ run, centre, magnified })),
    scroll: [window.scrollX, window.scrollY],
  };
}

function restore({ fields, open, sorts: sorted, maps: views, scroll }) {
  for (const [id, value] of fields) restoreField(byId(id), value);
  for (const id of open) byId(id)?.setAttribute("open", "");
  for (const [id, column, direction] of sorted) if (byId(id)) sortBy(byId(id), column, direction);
  for (const view of views) Object.assign(maps.find(({ run }) => run === view.run) ?? {}, view);
  redrawMaps();
  window.scrollTo({ left: scroll[0], top: scroll[1], behavior: "instant" });
}

function restoreField(field, value) {
  if (!field || value === (typeof value === "boolean" ? field.checked : field.value)) return;
  if (typeof value === "boolean") field.checked = value;
  else if (field.type === "search" || [...field.options].some((option) => option.value === value)) field.value = value;
  field.dispatchEvent(new Event("input", { bubbles: true }));
  field.dispatchEvent(new Event("change", { bubbles: true }));
}
