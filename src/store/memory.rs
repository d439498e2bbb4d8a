//! The rules behind a lock, for one process.
