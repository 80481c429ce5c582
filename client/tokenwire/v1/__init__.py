"""Generated stubs of the `tokenwire.v1` contract; `make generate` writes this package."""
