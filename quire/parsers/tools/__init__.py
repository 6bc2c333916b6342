"""How families of models write their tool calls: one file a family, over the shared layouts."""
