"""The caller's side of the Multiplex RPC: `call` is the call, `step_view` and `typed_view` are its two interfaces."""
