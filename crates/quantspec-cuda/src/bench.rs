//! Times of the kernels at a model's shapes, with the bytes that each must move at least.
//!
//! A measurement is a graph of one kernel over buffers that together far exceed the L2 cache; the median of several replays
//! is reported. Contents are small finite numbers of the right format; kernel speed does not depend on their values.

mod attend;
mod elementwise;
mod gemms;
mod prompt;
mod stored;
use crate::device::{Arg, Buffer, Device, Kernel, Launch};
use quantspec_core::Result;
use quantspec_core::config::{ModelConfig, View};
use std::sync::Arc;

/// Least total bytes of a measurement's buffers: several times the largest L2.
const ROTATED_BYTES: usize = 512 << 20;
/// Timed replays of a graph, and warm-up replays.
const REPEATED: usize = 11;
const WARM_UP: usize = 3;
/// Calls in a graph for kernels whose operands stay in the cache in a step.
const CALLS: usize = 32;

/// One measurement.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Measured {
    /// Kernel: "attend", "linear", "norm", …
    pub kernel: &'static str,
    /// Variant of the kernel: the view, or the type of the weights.
    pub form: &'static str,
    /// Rows of the call.
    pub rows: usize,
    /// Tokens before them, where that matters.
    pub context: Option<usize>,
    /// Outputs and inputs of a GEMM.
    pub shape: Option<(usize, usize)>,
    /// Seconds of a call.
    pub seconds: f64,
    /// Bytes a call must read and write at least.
    pub bytes: usize,
    /// Floating-point operations of a call, for kernels of many rows.
    pub operations: Option<f64>,
}

impl Measured {
    /// A measurement without context or GEMM shape.
    fn of(kernel: &'static str, form: &'static str, rows: usize, seconds: f64, bytes: usize) -> Measured {
        Measured { kernel, form, rows, seconds, bytes, ..Measured::default() }
    }
}

/// Read bandwidth in bytes per second, measured with a kernel that only reads, on as much memory as is free.
///
/// # Errors
/// Device errors of the driver, [`quantspec_core::ErrorKind::DoesNotFit`] if the GPU has no memory for the buffer.
pub fn read_bytes_per_s(device: &Arc<Device>) -> Result<f64> {
    let bytes = (2 * ROTATED_BYTES).min(device.memory()?.0 / 2) / 16 * 16;
    let (from, to) = (filled(device, bytes)?, device.zeroed(4)?);
    let kernel = device.kernel("read_all", 0)?;
    let seconds = seconds(device, || {
        // The sum of small numbers never equals this.
        let arguments = [(&from).into(), Arg::Long(from.bytes() as u64 / 16), Arg::Int(i32::MIN), (&to).into()];
        let launch = Launch { grid: [8 * device.info.sms as u32, 1, 1], block: 512, shared: 0, overlap: false };
        // SAFETY: the buffer has that many pieces.
        unsafe { device.launch(kernel, launch, &arguments) }
    })?;
    Ok(from.bytes() as f64 / seconds)
}

/// Times every kernel of a step and of a prompt block, at `rows` rows and after each of `contexts` tokens. `report` gets the
/// results one by one; its error ends the measurement.
///
/// # Errors
/// [`quantspec_core::ErrorKind::Model`] for head widths and sizes without kernels, [`quantspec_core::ErrorKind::DoesNotFit`]
/// if buffers do not fit on the GPU, other device errors of the driver, and those of `report`.
pub fn measure(
    device: &Arc<Device>,
    config: &ModelConfig,
    contexts: &[usize],
    rows: &[usize],
    report: &mut dyn FnMut(Measured) -> Result<()>,
) -> Result<()> {
    let bench = Bench { device: device.clone(), config: config.clone() };
    for &context in contexts {
        for view in [View::Upper, View::Both, View::Full] {
            bench.attend(view, context, rows, report)?;
        }
    }
    bench.gemms(rows, report)?;
    bench.drafts(rows, report)?;
    bench.small(rows, report)?;
    bench.ends(rows, report)?;
    bench.pages(report)?;
    bench.weights(report)?;
    bench.prompt(contexts, report)
}

/// Median seconds of some replays of a graph of `work`, after a warm-up.
fn seconds(device: &Arc<Device>, work: impl FnMut() -> Result<()>) -> Result<f64> {
    let graph = device.record(work)?;
    let mut times = Vec::with_capacity(REPEATED);
    for round in 0..WARM_UP + REPEATED {
        let start = device.mark()?;
        // SAFETY: callers keep all recorded buffers until this returns.
        unsafe { graph.launch() }?;
        let took = start.seconds_to(&device.mark()?)?;
        if round >= WARM_UP {
            times.push(took);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// Memory filled with f16 or bf16 values of ordinary size.
fn filled(device: &Arc<Device>, bytes: usize) -> Result<Buffer> {
    let ones: Vec<u16> = (0..1 << 19).map(|i: u32| 0x2c00 + (i.wrapping_mul(2_654_435_761) >> 22) as u16).collect();
    repeated(device, &device.copied(&ones)?, bytes)
}

/// Memory that repeats a pattern.
fn repeated(device: &Arc<Device>, pattern: &Buffer, bytes: usize) -> Result<Buffer> {
    let buffer = device.allocate(bytes)?;
    for at in (0..bytes).step_by(pattern.bytes().max(1)) {
        buffer.copy_from(at, pattern, 0, pattern.bytes().min(bytes - at))?;
    }
    device.synchronize()?;
    Ok(buffer)
}
struct Bench {
    device: Arc<Device>,
    config: ModelConfig,
}

impl Bench {
    /// Number of copies that together exceed the cache.
    fn copies(&self, bytes: usize) -> usize {
        (ROTATED_BYTES / bytes.max(1)).clamp(2, 96)
    }

    fn launch(&self, kernel: Kernel, grid: [usize; 3], block: u32, shared: usize, arguments: &[Arg]) -> Result<()> {
        let launch = Launch { grid: grid.map(|n| n as u32), block, shared: shared as u32, overlap: true };
        // SAFETY: callers pass the kernel's own argument list; buffers have its shapes and live until the measurement is
        // done.
        unsafe { self.device.launch(kernel, launch, arguments) }
    }

    /// Median seconds of one of [`CALLS`] calls.
    fn called(&self, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
        Ok(seconds(&self.device, || (0..CALLS).try_for_each(|_| call()))? / CALLS as f64)
    }
}
