//! Records the commit of the sources, for reports.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    let Some(manifest) = env::var_os("CARGO_MANIFEST_DIR") else { return };
    let root = PathBuf::from(manifest).join("../..");
    let git = |arguments: &[&str]| {
        let output = Command::new("git").current_dir(&root).args(arguments).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        (output.status.success() && !text.trim().is_empty()).then(|| text.trim().to_owned())
    };
    for path in ["build.rs", "src", "../quantspec-core/src", "../quantspec-model/src", "../quantspec-cpu/src"] {
        println!("cargo:rerun-if-changed={path}");
    }
    for path in ["../quantspec-cuda/src", "../../kernels"] {
        println!("cargo:rerun-if-changed={path}");
    }
    // Sources without a repository of their own may lie inside another one.
    let top = git(&["rev-parse", "--show-toplevel"]).and_then(|top| Path::new(&top).canonicalize().ok());
    if top.is_none() || top != root.canonicalize().ok() {
        return;
    }
    // The log of HEAD grows with each commit and checkout.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo:rerun-if-changed={}", root.join(log).display());
    }
    if let Some(commit) = git(&["describe", "--always", "--exclude", "*", "--abbrev=12", "--dirty= with changes"]) {
        println!("cargo:rustc-env=QUANTSPEC_COMMIT={commit}");
    }
}
