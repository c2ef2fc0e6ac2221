// The whole: which run is shown, light or dark, and the start of everything else.

const THEMES = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" };

function startTheme() {
  const button = byId("theme");
  const names = Object.keys(THEMES);
  let chosen = recall("localStorage", "cmsf-report:theme");
  if (!names.includes(chosen)) chosen = "auto";
  const show = () => {
    if (chosen === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    button.textContent = THEMES[chosen];
    redrawMaps();
  };
  button.addEventListener("click", () => {
    chosen = names[(names.indexOf(chosen) + 1) % names.length];
    remember("localStorage", "cmsf-report:theme", chosen);
    show();
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawMaps);
  show();
}

function startSwitch() {
  byId("switch")?.addEventListener("change", (event) => showRun(event.target.value));
  window.addEventListener("hashchange", showRunOfAddress);
  showRunOfAddress();
}

// The other run is shown at the part that was being read, as far as it has it.
function showRun(number) {
  const before = all("article.run:not([hidden]) section[data-part]").findLast((part) => part.getBoundingClientRect().top < window.innerHeight / 2);
  const height = before?.getBoundingClientRect().top;
  for (const element of all("article.run, nav.sections")) element.hidden = element.dataset.run !== number;
  const after = before && document.querySelector(`article.run:not([hidden]) section[data-part="${before.dataset.part}"]`);
  if (after) window.scrollBy({ top: after.getBoundingClientRect().top - height, behavior: "instant" });
  redrawMaps();
}

// An address may name a part of a run that is not the first.
function showRunOfAddress() {
  const number = /^#(?:run|walk)-(\d+)-/.exec(location.hash)?.[1];
  const choice = number && byId(`switch-${number}`);
  if (!choice || choice.checked) return;
  choice.checked = true;
  showRun(number);
  byId(location.hash.slice(1))?.scrollIntoView();
}

startThumbs();
startTables();
startMaps();
startTheme();
startSwitch();
startPrinting();
startWalk();
startLive();
startKeeping();
