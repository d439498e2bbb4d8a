//! The real SDKs and curl, as `.ci/setup` laid them out under `target/sdk`.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The root of the repository.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn there(path: PathBuf) -> PathBuf {
    assert!(path.exists(), "{} is missing; ./.ci/setup makes it", path.display());
    path
}

/// The Python that has the SDKs.
pub fn python_path() -> PathBuf {
    there(root().join("target/sdk/python/bin/python"))
}

/// The directory whose `node_modules` has the SDKs.
pub fn node_dir() -> PathBuf {
    there(root().join("target/sdk/node/node_modules/openai"));
    root().join("target/sdk/node")
}

/// The Node that knows proxy variables by itself, which the machine's own may be too old for.
pub fn node24_path() -> PathBuf {
    there(root().join("target/sdk/node/node_modules/.bin/node"))
}

/// A program with nothing in its environment but a search path.
fn bare(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default()).current_dir(root());
    command
}

/// Python with the SDKs, about to run this file of the repository.
pub fn python(script: &str) -> Command {
    let mut command = bare(python_path());
    command.arg(root().join(script)).env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

/// Node with the SDKs, about to run this file of the repository.
pub fn node(script: &str) -> Command {
    let mut command = bare("node");
    command.arg(root().join(script)).env("NODE_SDKS", node_dir());
    command
}

/// curl with these arguments, failing on error answers.
pub fn curl(args: &[&str]) -> Command {
    let mut command = bare("curl");
    command.args(["--silent", "--show-error", "--fail-with-body", "--max-time", "20"]).args(args);
    command
}
