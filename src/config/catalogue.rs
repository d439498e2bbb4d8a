//! The built-in providers, compiled in from `config/providers.toml`.
