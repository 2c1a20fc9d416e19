//! Helpers of the GPU tests: a device or a printed skip, random numbers, and conversions.
#![allow(dead_code, reason = "every test file uses its own part")]
#![allow(clippy::print_stderr, reason = "a skipped test must say so")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use half::{bf16, f16};
use quantspec_core::config::{Dtype, ModelConfig, Rope};
use quantspec_cuda::device::{Arg, Buffer, Device, Launch};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The first GPU, or `None` with the reason on stderr. With `QUANTSPEC_REQUIRE_GPU=1` its absence fails the test.
/// `QUANTSPEC_TEST_PTX=1` uses the PTX images, as GPUs newer than this library do.
pub(crate) fn device() -> Option<Arc<Device>> {
    let opened = if std::env::var_os("QUANTSPEC_TEST_PTX").is_some() { Device::open_ptx(0) } else { Device::open(0) };
    match opened {
        Ok(device) => Some(device),
        Err(error) => {
            assert!(std::env::var_os("QUANTSPEC_REQUIRE_GPU").is_none(), "no GPU: {} ({})", error.message, error.hint);
            eprintln!("SKIPPED, no GPU: {} ({})", error.message, error.hint);
            None
        }
    }
}

/// Launches kernel `name` and waits for it.
pub(crate) fn run(device: &Arc<Device>, name: &str, grid: [usize; 3], block: u32, shared: usize, arguments: &[Arg]) {
    let kernel = device.kernel(name, shared).unwrap();
    let launch = Launch { grid: grid.map(|n| n as u32), block, shared: shared as u32, overlap: false };
    // SAFETY: the tests pass the arguments documented in kernels/, with buffers of those shapes.
    unsafe { device.launch(kernel, launch, arguments) }.unwrap();
    device.synchronize().unwrap();
}

/// Int8 inputs `[rows][groups][128]` and their pairs {scale, sum}, arranged for a step's GEMMs: row-major, or panels
/// (kernels/panel.cuh), where missing rows hold 99 and NaN.
pub(crate) fn arranged(codes: &[i8], scales: &[f32], rows: usize, groups: usize, panels: usize) -> (Vec<i8>, Vec<f32>) {
    if panels == 0 {
        return (codes[..rows * groups * 128].to_vec(), scales[..rows * groups * 2].to_vec());
    }
    let (mut to, mut to_scales) = (Vec::new(), Vec::new());
    for first in (0..rows).step_by(64) {
        for group in 0..groups {
            for row in first..rows.min(first + 64).next_multiple_of(8) {
                let from = row * groups + group;
                let mut place = [99i8; 128];
                if row < rows {
                    for (k, &code) in codes[from * 128..][..128].iter().enumerate() {
                        let (half, lane, step, pair) = (k / 64, k % 64 / 16, k % 16 / 8, k % 8 / 4);
                        let piece = (half * 4 + step * 2 + pair) ^ (row % 8);
                        place[piece * 16 + lane * 4 + k % 4] = code;
                    }
                }
                to.extend(place);
                to_scales.extend(if row < rows { [scales[from * 2], scales[from * 2 + 1]] } else { [f32::NAN; 2] });
            }
        }
    }
    (to, to_scales)
}

/// Every row count of a verification of one sequence, and the limits of larger kernels and of panels.
pub(crate) const COUNTS: [usize; 24] =
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 25, 32, 33, 63, 64, 71, 136];

/// Inputs of GEMMs with weights in planes (`Limbs` in kernels/numbers.cuh).
pub(crate) struct Limbs {
    /// `[rows][groups][64 high limbs, 64 low limbs]`, k padded to 128.
    pub(crate) codes: Vec<i8>,
    /// {scale, scale times the sum of the codes} `[rows][groups]`.
    pub(crate) scales: Vec<f32>,
    /// The numbers that the codes stand for, `[rows][k]`.
    pub(crate) values: Vec<f64>,
}

/// Groups of a row of `k` inputs in limbs.
pub(crate) fn limb_groups(k: usize) -> usize {
    2 * k.div_ceil(128)
}

impl Limbs {
    /// Of x `[rows][k]`.
    pub(crate) fn new(x: &[f32], k: usize) -> Limbs {
        let mut limbs = Limbs { codes: Vec::new(), scales: Vec::new(), values: Vec::new() };
        for row in x.chunks(k) {
            for group in 0..limb_groups(k) {
                let x = &row[(group * 64).min(k)..(group * 64 + 64).min(k)];
                let largest = x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                let scale = largest / 32_512.0;
                let code = |&x: &f32| if scale > 0.0 { (x / scale).round_ties_even() as i32 } else { 0 };
                let mut codes: Vec<i32> = x.iter().map(code).collect();
                limbs.values.extend(codes.iter().map(|&code| f64::from(code) * f64::from(scale)));
                codes.resize(64, 0);
                limbs.codes.extend(codes.iter().map(|code| ((code + 128) >> 8) as i8));
                limbs.codes.extend(codes.iter().map(|code| *code as i8));
                limbs.scales.extend([scale, scale * codes.iter().sum::<i32>() as f32]);
            }
        }
        limbs
    }

    /// The first `rows` rows of `k` inputs on the device, in `panels`: x and xs.
    pub(crate) fn upload(&self, device: &Arc<Device>, rows: usize, k: usize, panels: usize) -> [Buffer; 2] {
        let (codes, scales) = arranged(&self.codes, &self.scales, rows, limb_groups(k), panels);
        [device.copied(&codes).unwrap(), device.copied(&scales).unwrap()]
    }
}

/// splitmix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub(crate) fn uniform(&mut self) -> f32 {
        ((self.next() >> 40) as f32 + 0.5) / 16_777_216.0
    }

    pub(crate) fn normal(&mut self) -> f32 {
        (-2.0 * self.uniform().ln()).sqrt() * (std::f32::consts::TAU * self.uniform()).cos()
    }

    pub(crate) fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

/// A model of one layer of which attention is tested.
pub(crate) fn config(heads: usize, kv_heads: usize, head_dim: usize) -> ModelConfig {
    let rope = Rope { dim: head_dim, ..ModelConfig::default().rope };
    ModelConfig { heads, kv_heads, head_dim, rope, tied_embeddings: true, dtype: Dtype::Bf16, ..ModelConfig::default() }
}

/// GELU by its definition with tanh.
pub(crate) fn gelu(x: f64) -> f64 {
    let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
    0.5 * x * (1.0 + u.tanh())
}

/// Rounds to a stored type and back.
pub(crate) fn round(x: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::Bf16 => bf16::from_f32(x).to_f32(),
        Dtype::F16 => f16::from_f32(x).to_f32(),
        Dtype::F32 => x,
    }
}

/// Device memory with `values` in a stored type.
pub(crate) fn upload(device: &Arc<Device>, values: &[f32], dtype: Dtype) -> Buffer {
    match dtype {
        Dtype::Bf16 => device.copied(&values.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>()),
        Dtype::F16 => device.copied(&values.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>()),
        Dtype::F32 => device.copied(values),
    }
    .unwrap()
}

/// `count` values of a stored type.
pub(crate) fn download(buffer: &Buffer, count: usize, dtype: Dtype) -> Vec<f32> {
    match dtype {
        Dtype::Bf16 => buffer.read::<bf16>(0, count).unwrap().iter().map(|x| x.to_f32()).collect(),
        Dtype::F16 => buffer.read::<f16>(0, count).unwrap().iter().map(|x| x.to_f32()).collect(),
        Dtype::F32 => buffer.read::<f32>(0, count).unwrap(),
    }
}

pub(crate) fn name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Bf16 => "bf16",
        Dtype::F16 => "f16",
        Dtype::F32 => "f32",
    }
}

/// Device memory of `bytes` bytes 0xff: NaN in every float type, so that unwritten results fail.
pub(crate) fn poisoned(device: &Arc<Device>, bytes: usize) -> Buffer {
    let buffer = device.allocate(bytes).unwrap();
    buffer.fill(0xff).unwrap();
    buffer
}

/// ‖a − b‖ / ‖b‖; NaN fails every comparison.
pub(crate) fn distance(a: &[f32], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let (mut difference, mut norm) = (0.0, 0.0);
    for (&x, &y) in a.iter().zip(b) {
        difference += (f64::from(x) - y).powi(2);
        norm += y * y;
    }
    (difference / norm.max(1e-300)).sqrt()
}

/// Row-major `[n][k]` in atoms of 16 rows and 64 columns, as 16-bit patterns.
pub(crate) fn atoms(values: &[u16], n: usize, k: usize) -> Vec<u16> {
    let (tiles, blocks) = (n.div_ceil(16), k.div_ceil(64));
    let mut out = vec![0; tiles * blocks * 1024];
    for row in 0..n {
        for column in 0..k {
            let piece = (column % 64 / 8) ^ (row & 7);
            out[((row / 16 * blocks + column / 64) * 16 + row % 16) * 64 + piece * 8 + column % 8] =
                values[row * k + column];
        }
    }
    out
}

/// Bit patterns of a 16-bit type.
pub(crate) fn bits(values: &[f32], dtype: Dtype) -> Vec<u16> {
    match dtype {
        Dtype::Bf16 => values.iter().map(|&x| bf16::from_f32(x).to_bits()).collect(),
        _ => values.iter().map(|&x| f16::from_f32(x).to_bits()).collect(),
    }
}

/// A weight matrix in the device's layout: atoms, or row-major in f32.
pub(crate) fn matrix(device: &Arc<Device>, values: &[f32], n: usize, k: usize, dtype: Dtype) -> Buffer {
    match dtype {
        Dtype::F32 => device.copied(values),
        _ => device.copied(&atoms(&bits(values, dtype), n, k)),
    }
    .unwrap()
}

/// Rows of gate and up interleaved by eight.
pub(crate) fn interleave(gate: &[f32], up: &[f32], rows: usize, width: usize) -> Vec<f32> {
    (0..2 * rows)
        .flat_map(|row| {
            let (from, at) = (if row % 16 < 8 { gate } else { up }, row / 16 * 8 + row % 8);
            from[at * width..(at + 1) * width].iter().copied()
        })
        .collect()
}

/// Calls `work` while another stream reads memory on every second SM, which delays loads of blocks on the same SM. A kernel
/// that lacks a wait may give correct bits on an idle GPU, and wrong ones here.
pub(crate) fn while_busy<T>(device: &Arc<Device>, work: impl FnOnce() -> T) -> T {
    struct Done(Arc<AtomicBool>);
    impl Drop for Done {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let stop = Arc::new(AtomicBool::new(false));
    let (of_thread, blocks) = (stop.clone(), (device.info.sms / 2).max(1));
    let (started, waiting) = std::sync::mpsc::channel();
    let reader = std::thread::spawn(move || {
        // Far more than a cache holds.
        const BYTES: usize = 2 << 30;
        let other = Device::open(0).unwrap();
        let (from, to) = (other.zeroed(BYTES).unwrap(), other.zeroed(4).unwrap());
        while !of_thread.load(Ordering::Relaxed) {
            for _ in 0..8 {
                let kernel = other.kernel("read_all", 0).unwrap();
                let launch = Launch { grid: [blocks as u32, 1, 1], block: 512, shared: 0, overlap: false };
                let arguments = [(&from).into(), Arg::Long(BYTES as u64 / 16), Arg::Int(1), (&to).into()];
                // SAFETY: the arguments documented in kernels/elementwise.cu; both buffers outlive the wait.
                unsafe { other.launch(kernel, launch, &arguments) }.unwrap();
            }
            let _ = started.send(());
            other.synchronize().unwrap();
        }
    });
    waiting.recv().unwrap();
    let done = Done(stop);
    let result = work();
    drop(done);
    reader.join().unwrap();
    result
}
