// On paper everything is open, every run is there, and it is light.

function startPrinting() {
  let undo = () => {};
  window.addEventListener("beforeprint", () => {
    undo = openEverything();
    redrawMaps();
  });
  window.addEventListener("afterprint", () => {
    undo();
    redrawMaps();
  });
}

// Gives back what closes it again.
function openEverything() {
  const closed = all("details:not([open])");
  const hidden = all("article.run[hidden]");
  const theme = document.documentElement.dataset.theme;
  for (const details of closed) details.open = true;
  for (const run of hidden) run.hidden = false;
  document.documentElement.dataset.theme = "light";
  return () => {
    for (const details of closed) details.open = false;
    for (const run of hidden) run.hidden = true;
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
  };
}
