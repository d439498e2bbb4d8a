//! A configuration from the environment alone.
