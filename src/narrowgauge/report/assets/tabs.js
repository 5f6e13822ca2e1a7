// Accessible tabs: arrow keys, Home and End move between them, and the selected one is remembered.

function tabs(name, label, items, show) {
  const keys = items.map((item) => item.key);
  const wanted = choice(`tab-${name}`, keys[0]);
  let current = keys.includes(wanted) ? wanted : keys[0];
  const body = el("div", { role: "tabpanel", id: `panel-${name}` });
  const list = el("div", { class: "tabs", role: "tablist", "aria-label": label });
  const buttons = items.map((item) =>
    el(
      "button",
      {
        type: "button",
        role: "tab",
        id: `tab-${name}-${keys.indexOf(item.key)}`,
        "aria-controls": body.id,
        onclick: () => pick(item.key, false),
      },
      item.label,
    ),
  );

  function pick(key, focus) {
    current = key;
    choose(`tab-${name}`, key);
    buttons.forEach((button, index) => {
      const on = keys[index] === key;
      button.setAttribute("aria-selected", String(on));
      button.tabIndex = on ? 0 : -1;
      if (on) {
        body.setAttribute("aria-labelledby", button.id);
        if (focus) {
          button.focus();
          button.scrollIntoView({ block: "nearest", inline: "nearest" });
        }
      }
    });
    body.replaceChildren(...[show(key)].flat());
    forgetDetached();
  }

  list.addEventListener("keydown", (event) => {
    const index = keys.indexOf(current);
    const moves = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: keys.length - 1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    pick(keys[(moves[event.key] + keys.length) % keys.length], true);
  });
  list.append(...buttons);
  pick(current, false);
  // On a narrow screen the list scrolls to show the selected tab, without moving the page.
  requestAnimationFrame(() => {
    const button = buttons[keys.indexOf(current)];
    list.scrollLeft = button.offsetLeft - list.offsetLeft - 24;
  });
  return el("div", {}, list, body);
}
