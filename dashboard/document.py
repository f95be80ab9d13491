"""The one HTML document behind every page: a skeleton of the frame stands in it until the scripts have loaded."""

from __future__ import annotations

from dash import Dash

_SKELETON = """
<div id="react-entry-point">
  <div class="shell first-load" aria-busy="true">
    <div class="nav"><div class="brand"><span class="logo"></span><span class="brand-name">phasewise</span></div></div>
    <div class="column">
      <div class="topbar"><span class="skeleton" style="width:180px;height:30px"></span></div>
      <div class="main">
        <div class="skeleton" style="height:34px;width:62%"></div>
        <div class="skeleton" style="height:84px"></div>
        <div class="grid-8-4"><div class="skeleton" style="height:460px"></div><div class="skeleton" style="height:460px"></div></div>
      </div>
    </div>
  </div>
</div>
"""


class Document(Dash):
    """Dash with our document. `assets/early.js` runs first: it sets the theme before anything is painted."""

    def interpolate_index(self, **parts: str) -> str:  # type: ignore[override]
        early = self.get_asset_url("early.js")
        return f"""<!DOCTYPE html>
<html lang="en" data-theme="dark">
  <head>
    <meta charset="utf-8">
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <meta name="color-scheme" content="dark light">
    <title>{parts["title"]}</title>
    <link rel="icon" type="image/svg+xml" href="{self.get_asset_url("logo.svg")}">
    <script src="{early}"></script>
    {parts["css"]}
  </head>
  <body>
    {_SKELETON}
    <footer>{parts["config"]}{parts["scripts"]}{parts["renderer"]}</footer>
  </body>
</html>"""
