//! The rules of the lease store as a pure state machine: time is an argument, nothing here waits.
