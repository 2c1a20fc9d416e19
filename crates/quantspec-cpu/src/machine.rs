//! Operating-system information about this machine and process.

use std::fs;
use std::path::Path;

/// A field of a `/proc` file in bytes, from a line like `MemAvailable:   123 kB`.
fn proc_bytes(path: &str, field: &str) -> Option<usize> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(field))?;
    let kilobytes: usize = line.split_whitespace().nth(1)?.parse().ok()?;
    kilobytes.checked_mul(1024)
}

/// File names of a cgroup version: limit, use, and the cached files' entry in `memory.stat`.
struct Groups {
    limit: &'static str,
    used: &'static str,
    cached: [&'static str; 2],
}

const VERSION_2: Groups =
    Groups { limit: "memory.max", used: "memory.current", cached: ["inactive_file", "active_file"] };
const VERSION_1: Groups = Groups {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cached: ["total_inactive_file", "total_active_file"],
};

/// Bytes left to this process by its cgroups, if one of them has a limit.
fn group_available() -> Option<usize> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    // Version 2 has one line, "0::/path"; version 1 one per controller, "9:memory:/path". Inside a container the path is the
    // host's and may not exist.
    let own = |controller: &str| {
        groups.lines().find_map(|line| {
            let (names, path) = line.split_once(':')?.1.split_once(':')?;
            names.split(',').any(|name| name == controller).then(|| path.trim_start_matches('/'))
        })
    };
    let hierarchies = [
        ("/sys/fs/cgroup", own(""), &VERSION_2),
        ("/sys/fs/cgroup/unified", own(""), &VERSION_2),
        ("/sys/fs/cgroup/memory", own("memory"), &VERSION_1),
    ];
    hierarchies
        .iter()
        .filter_map(|(root, own, version)| tightest(Path::new(root), own.unwrap_or_default(), version))
        .min()
}

/// The least bytes left by the cgroup `own` below `root` or by a parent group: its limit minus its use. Cached files count as
/// used (for example a checkpoint just downloaded), but the kernel reclaims them before it refuses memory.
fn tightest(root: &Path, own: &str, version: &Groups) -> Option<usize> {
    let left = |group: &Path| {
        let read = |file: &str| fs::read_to_string(group.join(file)).ok();
        let limit: usize = read(version.limit)?.trim().parse().ok()?;
        let used: usize = read(version.used)?.trim().parse().ok()?;
        let stat = read("memory.stat").unwrap_or_default();
        let cached = |name: &str| -> usize {
            let value = stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            value.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
        };
        Some(limit.saturating_sub(used.saturating_sub(version.cached.map(cached).iter().sum())))
    };
    root.join(own).ancestors().take_while(|group| group.starts_with(root)).filter_map(left).min()
}

/// Bytes left of this process's address space, if it has a limit (`ulimit -v`). Threads then share a heap, because what they
/// reserve counts.
fn address_space_available() -> Option<usize> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let limit = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    let limit: usize = limit.split_whitespace().next()?.parse().ok()?;
    crate::memory::share_heap();
    Some(limit.saturating_sub(proc_bytes("/proc/self/status", "VmSize:")?))
}

/// Bytes this process can still allocate without swapping, or None if unknown.
pub fn memory_available() -> Option<usize> {
    let machine = proc_bytes("/proc/meminfo", "MemAvailable:");
    [machine, group_available(), address_space_available()].into_iter().flatten().min()
}

/// Bytes of memory in all.
pub fn memory_total() -> Option<usize> {
    proc_bytes("/proc/meminfo", "MemTotal:")
}

/// Resident bytes of this process now.
pub fn resident() -> Option<usize> {
    proc_bytes("/proc/self/status", "VmRSS:")
}

/// Peak resident size of this process, in bytes.
pub fn peak_resident() -> Option<usize> {
    proc_bytes("/proc/self/status", "VmHWM:")
}

/// Name of the processor, or of its architecture if unknown.
pub fn cpu_name() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    info.lines()
        .find(|line| line.starts_with("model name"))
        .and_then(|line| line.split_once(':'))
        .map_or_else(|| std::env::consts::ARCH.to_string(), |(_, name)| name.trim().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_leave_what_they_do_not_need() {
        for (version, groups) in [("2", &VERSION_2), ("1", &VERSION_1)] {
            let root = std::env::temp_dir().join(format!("quantspec-groups-{version}-{}", std::process::id()));
            let [inactive, active] = groups.cached;
            let group = |path: &str, max: &str, current: &str, stat: &str| {
                let folder = root.join(path);
                fs::create_dir_all(&folder).unwrap();
                for (file, text) in [(groups.limit, max), (groups.used, current), ("memory.stat", stat)] {
                    fs::write(folder.join(file), text).unwrap();
                }
            };
            let tightest = |own: &str| tightest(&root, own, groups);
            assert_eq!(tightest("a/b"), None);
            group("", "max\n", "7\n", "");
            assert_eq!(tightest("a/b"), None);
            group("a", "1000\n", "600\n", &format!("anon 300\n{inactive} 100\n{active} 50\nfile 900\n"));
            assert_eq!(tightest("a/b"), Some(550));
            group("a/b", "500\n", "450\n", "anon 450\n");
            assert_eq!(tightest("a/b"), Some(50));
            // For a host cgroup that does not exist here, the nearest existing parent counts.
            assert_eq!(tightest("a/gone/deep"), Some(550));
            group("a/b", "500\n", "900\n", "");
            assert_eq!(tightest("a/b"), Some(0));
            fs::remove_dir_all(&root).unwrap();
        }
    }
}
