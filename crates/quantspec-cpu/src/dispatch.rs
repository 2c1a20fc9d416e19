//! The SIMD path of this process: chosen once, or forced by `QUANTSPEC_SIMD`.

use quantspec_core::{Error, Result};
#[cfg(target_arch = "x86_64")]
use std::sync::OnceLock;

/// A set of kernels. Each path is row-invariant to the bit; two paths agree within stated bounds only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Simd {
    /// Plain Rust, any CPU.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ, VL, VNNI and BF16, FMA and F16C.
    Avx512,
    /// x86-64 with everything of [`Simd::Avx512`] and tiles of BF16 and int8.
    Amx,
    /// aarch64.
    Neon,
}

/// The path in use, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChosenPath {
    /// The path.
    pub simd: Simd,
    /// One line for `doctor`.
    pub reason: String,
}

impl Simd {
    /// All paths, the best first.
    pub const ALL: [Simd; 5] = [Simd::Amx, Simd::Avx512, Simd::Avx2, Simd::Neon, Simd::Scalar];

    /// The name `QUANTSPEC_SIMD` takes.
    pub const fn name(self) -> &'static str {
        match self {
            Simd::Scalar => "scalar",
            Simd::Avx2 => "avx2",
            Simd::Avx512 => "avx512",
            Simd::Amx => "amx",
            Simd::Neon => "neon",
        }
    }

    /// The path has the instructions of [`Simd::Avx512`].
    pub const fn has_avx512(self) -> bool {
        matches!(self, Simd::Avx512 | Simd::Amx)
    }

    /// What this path needs and this machine lacks, CPU features first; empty if the path runs.
    pub fn missing(self) -> Vec<&'static str> {
        let lacking = |features: Vec<(&'static str, bool)>| -> Vec<&'static str> {
            features.into_iter().filter(|(_, there)| !there).map(|(name, _)| name).collect()
        };
        match self {
            Simd::Scalar => Vec::new(),
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 => lacking(vec![
                ("avx2", is_x86_feature_detected!("avx2")),
                ("fma", is_x86_feature_detected!("fma")),
                ("f16c", is_x86_feature_detected!("f16c")),
            ]),
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512 => lacking(vec![
                ("avx512f", is_x86_feature_detected!("avx512f")),
                ("avx512bw", is_x86_feature_detected!("avx512bw")),
                ("avx512dq", is_x86_feature_detected!("avx512dq")),
                ("avx512vl", is_x86_feature_detected!("avx512vl")),
                ("avx512vnni", is_x86_feature_detected!("avx512vnni")),
                ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
                ("fma", is_x86_feature_detected!("fma")),
                ("f16c", is_x86_feature_detected!("f16c")),
            ]),
            #[cfg(target_arch = "x86_64")]
            Simd::Amx => {
                let mut missing = Simd::Avx512.missing();
                missing.extend(missing_for_tiles());
                missing
            }
            #[cfg(not(target_arch = "x86_64"))]
            Simd::Avx2 | Simd::Avx512 | Simd::Amx => lacking(vec![("x86-64", false)]),
            Simd::Neon => lacking(vec![("aarch64", cfg!(target_arch = "aarch64"))]),
        }
    }
}

/// What BF16 and int8 tiles need and this machine lacks; computed once.
#[cfg(target_arch = "x86_64")]
fn missing_for_tiles() -> Vec<&'static str> {
    static MISSING: OnceLock<Vec<&'static str>> = OnceLock::new();
    MISSING.get_or_init(find_missing_for_tiles).clone()
}

#[cfg(target_arch = "x86_64")]
fn find_missing_for_tiles() -> Vec<&'static str> {
    let leaf7 = if cpuid(0).eax >= 7 { cpuid(7).edx } else { 0 };
    let features = [("amx-bf16", 22), ("amx-tile", 24), ("amx-int8", 25)];
    let mut missing: Vec<_> =
        features.into_iter().filter(|(_, bit)| leaf7 >> bit & 1 == 0).map(|(name, _)| name).collect();
    if missing.is_empty() && !system_grants_tiles() {
        missing.push("the system's permission for tile registers");
    }
    missing
}

/// Requests permission to use tiles; returns true if granted. Linux 5.16 or newer saves their 8 KiB on request. The
/// permission covers all threads, including those already running.
#[cfg(target_arch = "x86_64")]
fn system_grants_tiles() -> bool {
    #[cfg(target_os = "linux")]
    {
        const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_long = 18;
        // SAFETY: the request takes a number and does not access this process's memory; a kernel without it returns an error.
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
    }
    #[cfg(not(target_os = "linux"))]
    false
}

/// The path of this process: the best the machine has, or the one that `QUANTSPEC_SIMD` names.
///
/// # Errors
/// [`quantspec_core::ErrorKind::Usage`] if the variable names no path, or one this machine lacks.
pub fn choose() -> Result<ChosenPath> {
    let forced = std::env::var_os("QUANTSPEC_SIMD");
    match forced.as_ref().map(|value| value.to_string_lossy()) {
        Some(name) if !name.is_empty() => force(&name),
        _ => Ok(best()),
    }
}

fn best() -> ChosenPath {
    let (mut reason, mut chosen) = (Vec::new(), Simd::Scalar);
    // Paths of other architectures are not listed.
    for simd in Simd::ALL.into_iter().filter(|simd| match simd {
        Simd::Avx2 | Simd::Avx512 | Simd::Amx => cfg!(target_arch = "x86_64"),
        Simd::Neon => cfg!(target_arch = "aarch64"),
        Simd::Scalar => true,
    }) {
        let missing = simd.missing();
        if missing.is_empty() {
            chosen = simd;
            break;
        }
        reason.push(format!("no {}: this machine lacks {}", simd.name(), missing.join(", ")));
    }
    reason.insert(0, format!("{} is the best this machine has", chosen.name()));
    ChosenPath { simd: chosen, reason: reason.join("; ") }
}

fn force(name: &str) -> Result<ChosenPath> {
    let Some(simd) = Simd::ALL.into_iter().find(|simd| simd.name() == name) else {
        return Err(Error::usage(
            format!("QUANTSPEC_SIMD is {name:?}"),
            "set it to scalar, avx2, avx512, amx or neon, or unset it to let the program choose",
        ));
    };
    let missing = simd.missing();
    if !missing.is_empty() {
        return Err(Error::usage(
            format!("QUANTSPEC_SIMD is {name}, and this machine lacks {}", missing.join(", ")),
            format!("unset it; {} is the best this machine has", best().simd.name()),
        ));
    }
    Ok(ChosenPath { simd, reason: format!("{name} was requested by QUANTSPEC_SIMD") })
}

/// Prefetch distance into L1 on Intel server cores, in bytes. On Sapphire Rapids, weights for one row arrive 1.5 times as
/// fast with it; [`FAR_AHEAD`] adds a tenth.
#[cfg(target_arch = "x86_64")]
pub(crate) const AHEAD: usize = 768;

/// Prefetch distance into L2 there, in bytes, within the 4 KiB page at which Intel's hardware prefetchers stop. 6 KiB gain
/// nothing.
#[cfg(target_arch = "x86_64")]
pub(crate) const FAR_AHEAD: usize = 3072;

/// Prefetch distance into L2 on other CPUs, in bytes. On Zen 4 4 to 16 KiB are equally good. L1 tracks too few outstanding lines
/// for the memory's speed: with prefetches into L1, four rows of planes take 1.3 times as long.
#[cfg(target_arch = "x86_64")]
const FAR_AHEAD_ALONE: usize = 4096;

/// Prefetch distances of a kernel for a stream in address order. They do not affect results.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "other architectures do not prefetch"))]
pub(crate) struct Prefetch {
    /// Bytes ahead, into L1; 0 if that does not pay.
    l1: usize,
    /// Bytes ahead, into L2.
    l2: usize,
}

impl Prefetch {
    /// The distances that pay on this CPU, if any. `busy`: the kernel's arithmetic takes longer than its loads. Prefetching
    /// always pays on Intel server cores. Zen 4's hardware prefetchers keep up with one row (6 % slower with this) but not
    /// with slower streams: five rows with AVX2 take 0.7 of the time.
    pub(crate) fn choose(busy: bool) -> Option<Prefetch> {
        #[cfg(target_arch = "x86_64")]
        {
            static INTEL: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
            let intel = *INTEL.get_or_init(|| {
                let id = cpuid(0);
                [id.ebx, id.edx, id.ecx].map(u32::to_le_bytes).concat() == b"GenuineIntel"
            });
            match (intel, busy) {
                (true, _) => Some(Prefetch { l1: AHEAD, l2: FAR_AHEAD }),
                (false, true) => Some(Prefetch { l1: 0, l2: FAR_AHEAD_ALONE }),
                (false, false) => None,
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            let _ = busy;
            None
        }
    }

    /// Prefetches the cache lines at this distance after `bytes` bytes from `at` on; any address is allowed.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(crate) fn lines<T>(self, at: *const T, bytes: usize) {
        (0..bytes).step_by(64).for_each(|line| self.line(at.cast::<u8>().wrapping_add(line)));
    }

    /// Prefetches the cache line at this distance after `at`; any address is allowed.
    #[inline(always)]
    pub(crate) fn line<T>(self, at: *const T) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch may have any address; SSE belongs to every x86-64 CPU.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T1>(at.cast::<i8>().wrapping_add(self.l2));
            if self.l1 > 0 {
                _mm_prefetch::<_MM_HINT_T0>(at.cast::<i8>().wrapping_add(self.l1));
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = at;
    }
}

/// CPUID of a leaf (sub-leaf 0).
#[cfg(target_arch = "x86_64")]
#[allow(unused_unsafe, reason = "the intrinsic is safe since Rust 1.94 and unsafe before")]
pub(crate) fn cpuid(leaf: u32) -> std::arch::x86_64::CpuidResult {
    // SAFETY: every x86-64 CPU has the instruction; an unsupported leaf returns meaningless numbers.
    unsafe { std::arch::x86_64::__cpuid_count(leaf, 0) }
}

/// Prefetches a cache line into L2; any address is allowed.
#[inline(always)]
pub(crate) fn fetch_far<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as above.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(at.cast::<i8>());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Calls a portable kernel (`#[inline(always)]`, generic over `const FMA: bool`) compiled for the path, so that its loops
/// over fixed arrays use the path's vectors.
macro_rules! portable {
    ($simd:expr, $body:ident $([$($generic:tt),*])? ($($arg:ident: $ty:ty),* $(,)?) $(-> $out:ty)?) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        fn avx2($($arg: $ty),*) $(-> $out)? { $body::<true $(, $($generic),*)?>($($arg),*) }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
        fn avx512($($arg: $ty),*) $(-> $out)? { $body::<true $(, $($generic),*)?>($($arg),*) }
        match $simd {
            // SAFETY: the path was chosen because the CPU has these features (`Simd::missing`).
            #[cfg(target_arch = "x86_64")]
            $crate::dispatch::Simd::Avx512 | $crate::dispatch::Simd::Amx => unsafe { avx512($($arg),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            $crate::dispatch::Simd::Avx2 => unsafe { avx2($($arg),*) },
            // NEON belongs to every aarch64 target; its multiply-add is one instruction.
            $crate::dispatch::Simd::Neon => $body::<true $(, $($generic),*)?>($($arg),*),
            _ => $body::<false $(, $($generic),*)?>($($arg),*),
        }
    }};
}
pub(crate) use portable;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unsupported_path_and_an_unknown_name_are_usage_errors() {
        let foreign = if cfg!(target_arch = "x86_64") { "neon" } else { "avx2" };
        for name in ["sse2", "AVX2", foreign] {
            assert_eq!(force(name).unwrap_err().kind, quantspec_core::ErrorKind::Usage, "{name}");
        }
        assert_eq!(force("scalar").unwrap().simd, Simd::Scalar);
    }

    #[test]
    fn the_best_path_is_supported_and_has_a_reason() {
        let choice = best();
        assert!(choice.simd.missing().is_empty());
        assert!(choice.reason.contains(choice.simd.name()));
    }
}
