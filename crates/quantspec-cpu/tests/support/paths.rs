//! The SIMD paths that tests run on. Included by files that know `Simd`.

use super::Simd;

/// The SIMD paths of this machine. Prints the others as skipped, and fails if `QUANTSPEC_REQUIRE_SIMD` lists one of them.
#[allow(clippy::print_stderr, reason = "tools/test.sh gathers what ran and what did not")]
pub(crate) fn paths() -> Vec<Simd> {
    let required = std::env::var("QUANTSPEC_REQUIRE_SIMD").unwrap_or_default();
    let required: Vec<&str> = required.split(',').filter(|name| !name.is_empty()).collect();
    for name in &required {
        assert!(
            Simd::ALL.iter().any(|simd| simd.name() == *name),
            "QUANTSPEC_REQUIRE_SIMD names {name:?}, which is no path"
        );
    }
    let runs = |simd: &Simd| {
        let (name, missing) = (simd.name(), simd.missing().join(", "));
        assert!(missing.is_empty() || !required.contains(&name), "QUANTSPEC_REQUIRE_SIMD: {name} lacks {missing}");
        let said =
            if missing.is_empty() { format!("TESTED: {name}") } else { format!("SKIPPED: {name} lacks {missing}") };
        eprintln!("{said}");
        missing.is_empty()
    };
    Simd::ALL.into_iter().filter(runs).collect()
}
