//! What lies in `examples/` is checked by the tools that read it.
