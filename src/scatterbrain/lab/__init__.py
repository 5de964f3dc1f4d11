"""Tasks and experiments around the library. The core never imports this package."""
