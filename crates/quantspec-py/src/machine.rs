//! What the operating system says about this machine and process.

use std::fs;

/// A field of a `/proc` file in bytes: lines look like `MemAvailable:   123 kB`.
fn proc_bytes(path: &str, field: &str) -> Option<usize> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(field))?;
    let kilobytes: usize = line.split_whitespace().nth(1)?.parse().ok()?;
    kilobytes.checked_mul(1024)
}

/// Memory limit of the control group this process runs in, where it has one, less what the group uses.
fn group_available() -> Option<usize> {
    let read = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<usize>().ok();
    let limit = read("/sys/fs/cgroup/memory.max")?;
    Some(limit.saturating_sub(read("/sys/fs/cgroup/memory.current").unwrap_or(0)))
}

/// Bytes this process may still take without swapping, or None where the system does not say.
pub(crate) fn memory_available() -> Option<usize> {
    let machine = proc_bytes("/proc/meminfo", "MemAvailable:");
    match (machine, group_available()) {
        (Some(machine), Some(group)) => Some(machine.min(group)),
        (machine, group) => machine.or(group),
    }
}

/// Bytes of memory in all.
pub(crate) fn memory_total() -> Option<usize> {
    proc_bytes("/proc/meminfo", "MemTotal:")
}

/// Resident bytes of this process now.
pub(crate) fn resident() -> Option<usize> {
    proc_bytes("/proc/self/status", "VmRSS:")
}

/// Largest resident size this process ever had, in bytes.
pub(crate) fn peak_resident() -> Option<usize> {
    proc_bytes("/proc/self/status", "VmHWM:")
}

/// Name of the processor, or of its architecture where the system does not say.
pub(crate) fn cpu_name() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    info.lines()
        .find(|line| line.starts_with("model name"))
        .and_then(|line| line.split_once(':'))
        .map_or_else(|| std::env::consts::ARCH.to_string(), |(_, name)| name.trim().to_string())
}
