//! The configuration file: parsed once, every mistake named with file, line and caret.
