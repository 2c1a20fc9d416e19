//! Compiles kernels/*.cu with NVRTC, taken from the Python package [`PACKAGE`] of the build environment. It embeds deflated
//! machine code for every architecture of [`ARCHITECTURES`], and PTX for newer ones.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a build script speaks to cargo on stdout, its children to it on stderr"
)]

use libloading::{Library, Symbol};
use std::collections::VecDeque;
use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::SystemTime;
use std::{env, fs, process, ptr, thread};

/// 12.8: its machine code loads on drivers from 525 on (13.x needs 580), and it supports sm_120.
const PACKAGE: &str = "cuda-toolkit[nvrtc,cudart]==12.8.1";

/// The newest PTX version that driver 525 accepts; the PTX image uses no newer instruction.
const PTX_VERSION: &str = "8.0";

/// Machine code images. 86 also serves 87 and 89, 100 also 103, 120 also 121 (newer minor of the same major). Compiled for 89,
/// all GEMMs and attention have the instructions of 86. 90a enables the Hopper-only instructions.
const ARCHITECTURES: [&str; 7] = ["sm_75", "sm_80", "sm_86", "sm_90a", "sm_100", "sm_120", "compute_80"];

/// Compiled on request and not embedded: checks in a third of sm_75's time that the lines for Turing alone compile.
const CHECKED: &str = "compute_75";

/// Deflate level: 6 compresses within 2 % of 10, five times faster.
const LEVEL: u8 = 6;
/// This program's source: it determines how kernels are compiled, so it is part of the images' hash.
const THIS: &[u8] = include_bytes!("build.rs");

const LOCATE: &str = "
import importlib.util, pathlib
def root(name):
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    return pathlib.Path(list(spec.submodule_search_locations)[0]) if spec else None
nvrtc, runtime = root('nvidia.cuda_nvrtc'), root('nvidia.cuda_runtime')
if nvrtc and runtime:
    found = sorted((nvrtc / 'lib').glob('libnvrtc.so.*')) + sorted((nvrtc / 'bin').glob('nvrtc64_*_0.dll'))
    found = [f for f in found if 'alt' not in f.name]
    if found:
        print(found[0])
        print(runtime / 'include')
";

/// Ends the build with one line.
fn fail(message: &str) -> ! {
    println!("cargo::error={}", message.replace('\n', " "));
    process::exit(1)
}

struct Toolkit {
    library: PathBuf,
    include: PathBuf,
}

fn toolkit() -> Toolkit {
    let python =
        env::var("PYO3_PYTHON").unwrap_or_else(|_| if cfg!(windows) { "python" } else { "python3" }.to_owned());
    let missing = format!(
        "NVRTC was not found by {python}: pip install \"{PACKAGE}\", or set QUANTSPEC_KERNELS=off for a build without GPU support"
    );
    let Ok(output) = process::Command::new(&python).args(["-c", LOCATE]).output() else { fail(&missing) };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut lines = text.lines().map(PathBuf::from);
    match (lines.next(), lines.next()) {
        (Some(library), Some(include)) => Toolkit { library, include },
        _ => fail(&missing),
    }
}

type Program = *mut c_void;

/// The NVRTC functions this script calls.
struct Nvrtc<'a> {
    create: Symbol<
        'a,
        unsafe extern "C" fn(*mut Program, *const c_char, *const c_char, c_int, *const c_void, *const c_void) -> c_int,
    >,
    compile: Symbol<'a, unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int>,
    destroy: Symbol<'a, unsafe extern "C" fn(*mut Program) -> c_int>,
    log: Output<'a>,
    cubin: Output<'a>,
    ptx: Output<'a>,
}

/// A pair of functions that return the size of an output, and the output.
struct Output<'a> {
    size: Symbol<'a, unsafe extern "C" fn(Program, *mut usize) -> c_int>,
    get: Symbol<'a, unsafe extern "C" fn(Program, *mut c_char) -> c_int>,
}

impl Output<'_> {
    fn read(&self, program: Program) -> Result<Vec<u8>, String> {
        let mut bytes = 0;
        // SAFETY: `program` is alive and the buffer has the size NVRTC reports.
        unsafe {
            let size = (self.size)(program, &mut bytes);
            let mut buffer = vec![0u8; bytes];
            let status = if size == 0 { (self.get)(program, buffer.as_mut_ptr().cast()) } else { size };
            match status {
                0 if bytes > 0 => Ok(buffer),
                0 => Err("NVRTC gave an empty result".to_owned()),
                status => Err(format!("NVRTC failed with status {status}")),
            }
        }
    }
}

impl<'a> Nvrtc<'a> {
    fn new(library: &'a Library) -> Result<Nvrtc<'a>, libloading::Error> {
        // SAFETY: the signatures are those of nvrtc.h 12.8.
        unsafe {
            let output = |size: &[u8], get: &[u8]| -> Result<Output<'a>, libloading::Error> {
                Ok(Output { size: library.get(size)?, get: library.get(get)? })
            };
            Ok(Nvrtc {
                create: library.get(b"nvrtcCreateProgram\0")?,
                compile: library.get(b"nvrtcCompileProgram\0")?,
                destroy: library.get(b"nvrtcDestroyProgram\0")?,
                log: output(b"nvrtcGetProgramLogSize\0", b"nvrtcGetProgramLog\0")?,
                cubin: output(b"nvrtcGetCUBINSize\0", b"nvrtcGetCUBIN\0")?,
                ptx: output(b"nvrtcGetPTXSize\0", b"nvrtcGetPTX\0")?,
            })
        }
    }

    fn image(&self, name: &str, source: &str, architecture: &str, includes: &[&Path]) -> Result<Vec<u8>, String> {
        let text = |value: String| CString::new(value).map_err(|_| "a kernel source holds a NUL".to_owned());
        let (source, name) = (text(source.to_owned())?, text(name.to_owned())?);
        let mut options = vec![
            text(format!("--gpu-architecture={architecture}"))?,
            text("-std=c++17".to_owned())?,
            text("-default-device".to_owned())?,
        ];
        for include in includes {
            options.push(text(format!("-I{}", include.display()))?);
        }
        let pointers: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = ptr::null_mut();
        // SAFETY: every pointer outlives the call it is passed to; the program is destroyed once.
        unsafe {
            let created = (self.create)(&mut program, source.as_ptr(), name.as_ptr(), 0, ptr::null(), ptr::null());
            if created != 0 {
                return Err(format!("NVRTC takes no program: status {created}"));
            }
            let status = (self.compile)(program, pointers.len() as c_int, pointers.as_ptr());
            let result = if status != 0 {
                // The first error; later ones usually follow from it.
                let log = self.log.read(program).unwrap_or_else(|error| error.into_bytes());
                let log = String::from_utf8_lossy(&log).into_owned();
                Err(log.lines().find(|line| line.contains("error")).unwrap_or(&log).to_owned())
            } else if architecture.starts_with("compute_") {
                self.ptx.read(program).map(|ptx| lower_version(&String::from_utf8_lossy(&ptx)))
            } else {
                self.cubin.read(program)
            };
            (self.destroy)(&mut program);
            result
        }
    }
}

/// Lowers the PTX's `.version` to [`PTX_VERSION`], so that drivers older than the compiler accept it, and removes the one
/// newer hint.
fn lower_version(ptx: &str) -> Vec<u8> {
    let lines = ptx.trim_end_matches('\0').lines().filter(|line| !line.contains("\"used_bytes_mask"));
    let mut text: String = lines
        .map(
            |line| {
                if line.starts_with(".version ") { format!(".version {PTX_VERSION}\n") } else { format!("{line}\n") }
            },
        )
        .collect();
    text.push('\0');
    text.into_bytes()
}

/// FNV-1a; decides whether an earlier build's image is up to date.
fn hash(parts: &[&[u8]]) -> u64 {
    parts
        .iter()
        .flat_map(|part| part.iter())
        .fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| fail(&format!("{}: {error}", path.display())))
}

fn sources(directory: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap_or_else(|error| fail(&format!("{}: {error}", directory.display())));
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|e| e == extension))
        .collect();
    found.sort();
    found
}

/// Tables shared by kernels and launchers: the file, the macro that expands each row, the type of a row in src/shapes.rs, and
/// the macro's parameters that are its fields.
const TABLES: [(&str, &str, &str, &[&str]); 10] = [
    ("linear.cu", "PIPELINE", "Pipeline", &["NT", "CLUSTER", "SHARED"]),
    ("linear.cu", "DRAFT_PIPELINE", "DraftPipeline", &["NT", "CLUSTER", "HAND_OVER", "SHARED4", "SHARED8"]),
    ("linear.cu", "QUANT", "Quant", &["BITS", "NT", "STAGES"]),
    ("linear.cu", "WIDE", "Wide", &["BITS", "N", "SHARED"]),
    ("linear.cu", "WIDE_FULL", "WideFull", &["N", "SHARED"]),
    ("hierarchy.cu", "PLANE_PIPELINE", "PlanePipeline", &["PLANES", "NT", "CLUSTER", "HAND_OVER", "SHARED"]),
    ("hierarchy.cu", "WIDE_PLANES", "WidePlanes", &["PLANES", "N", "SHARED"]),
    ("attend.cu", "ATTEND", "Attend", &["D", "VIEW", "ROWS", "STAGES", "HALF_SM", "BLOCK", "STAGE_BYTES", "SHARED"]),
    (
        "attend_local.cu",
        "ATTEND_LOCAL",
        "Attend",
        &["D", "VIEW", "ROWS", "STAGES", "HALF_SM", "BLOCK", "STAGE_BYTES", "SHARED"],
    ),
    ("prefill_gemm.cu", "TILE", "Tile", &["COLUMNS", "CONSUMERS", "CLUSTER", "STAGES", "SHARED"]),
];

/// Numbers shared by kernels and launchers.
const NUMBERS: [(&str, &[&str]); 17] = [
    ("linear.cuh", &["LINEAR_WARPS"]),
    ("attend.cuh", &["UPPER", "BOTH", "FULL"]),
    ("linear_wide.cuh", &["WIDE_THREADS"]),
    ("panel.cuh", &["PANEL_ROWS"]),
    ("attend.cu", &["MERGE_SHARED"]),
    ("pages.cu", &["CHOICE_THREADS"]),
    ("draft.cu", &["DRAFT_TOGETHER", "DRAFT_STAGE_TILES", "DRAFT_AHEAD", "DRAFT_ROWS"]),
    ("penalty.cu", &["PENALTY_THREADS", "PENALTY_TOKENS", "COMMIT_TOKENS", "NGRAM_MAX", "WINDOW_MAX"]),
    ("sample.cu", &["SAMPLE_TILE", "SAMPLE_THREADS", "CUT_THREADS", "SAMPLE_VOCAB_MAX", "CUT_BYTES", "RACE_BYTES"]),
    ("layout.cuh", &["PAGE", "RING", "UPPER_BLOCK", "LOWER_BLOCK"]),
    ("elementwise.cu", &["NORM_THREADS"]),
    ("masses.cu", &["MASS_THREADS"]),
    ("prefill_gemm.cu", &["MMA_SHARED"]),
    (
        "prefill_attend.cu",
        &[
            "PROMPT_WGMMA_CHANNEL",
            "PROMPT_WGMMA_MORE",
            "PROMPT_MMA_CHANNEL",
            "PROMPT_MMA_CHANNEL_256",
            "PROMPT_WGMMA_THREADS",
            "PROMPT_WGMMA_FEW_THREADS",
            "PROMPT_MMA_THREADS",
        ],
    ),
    ("numbers.cuh", &["FLAG_CACHE", "FLAG_LOGITS", "FLAG_NO_TOKEN"]),
    ("quantize_pages.cu", &["PAGE_SHARED_CHANNEL", "PAGE_SHARED"]),
    ("quantize_weights.cu", &["FLAG_WEIGHTS"]),
];

/// Rust code of [`TABLES`] and [`NUMBERS`], read from the kernel sources: one row per line, numbers as `constexpr TYPE NAME =
/// 1, …;`. A table becomes a slice, or one constant per row if rows have a NAME.
fn shapes(kernels: &Path) -> String {
    let mut rust = String::new();
    for (file, macro_name, row, fields) in TABLES {
        let source = read(&kernels.join(file));
        let arguments = |line: &str, before: &str| -> Option<Vec<String>> {
            let line = line.trim().trim_end_matches('\\').trim().strip_prefix(before)?.strip_prefix('(')?;
            Some(line.split(')').next()?.split(',').map(|argument| argument.trim().to_owned()).collect())
        };
        let header = format!("#define {macro_name}");
        // A long list of parameters continues on the next line.
        let parameters = source.replace("\\\n", "").lines().find_map(|line| arguments(line, &header));
        let parameters = parameters.unwrap_or_else(|| fail(&format!("{file} does not define {macro_name}(…)")));
        let at = |field: &str| {
            let found = parameters.iter().position(|parameter| parameter == field);
            found.unwrap_or_else(|| fail(&format!("{macro_name} of {file} has no {field}")))
        };
        let rows = source.lines().filter_map(|line| arguments(line, macro_name)).map(|line| {
            let values = fields.iter().map(|field| format!("{}: {}", field.to_lowercase(), line[at(field)]));
            (line[0].to_uppercase(), format!("{row} {{ {} }}", values.collect::<Vec<_>>().join(", ")))
        });
        if parameters[0] == "NAME" {
            rows.for_each(|(name, values)| {
                rust += &format!("pub(crate) const {macro_name}_{name}: {row} = {values};\n")
            });
        } else {
            let values: Vec<String> = rows.map(|(_, values)| values).collect();
            rust += &format!("pub(crate) const {macro_name}: &[{row}] = &[{}];\n", values.join(", "));
        }
    }
    for (file, names) in NUMBERS {
        let source = read(&kernels.join(file));
        let lines =
            source.lines().filter_map(|line| line.strip_prefix("constexpr ")?.split_once(' ')?.1.split(';').next());
        let numbers: Vec<(&str, &str)> =
            lines.flat_map(|line| line.split(',')).filter_map(|number| number.split_once('=')).collect();
        for name in names {
            let found = numbers.iter().find(|(found, _)| found.trim() == *name);
            let (_, value) = found.unwrap_or_else(|| fail(&format!("{file} has no constexpr {name}")));
            rust += &format!("pub(crate) const {name}: usize = {};\n", value.trim());
        }
    }
    rust
}

/// The subprocess of [`compile`], with arguments `library include kernels stem architecture file`. Writes the deflated image
/// to `file`, and errors to standard error.
fn compile_one(arguments: &[String]) -> Result<(), String> {
    let [library, include, kernels, stem, architecture, file] = arguments else {
        return Err("a compiling process takes six arguments".to_owned());
    };
    // SAFETY: loading NVRTC runs only its own initialisers.
    let library = unsafe { Library::new(library) }.map_err(|error| format!("{error}; reinstall {PACKAGE}"))?;
    let nvrtc = Nvrtc::new(&library).map_err(|error| format!("{error}; install {PACKAGE}"))?;
    let name = format!("{stem}.cu");
    let kernels = Path::new(kernels);
    let image = nvrtc
        .image(&name, &read(&kernels.join(&name)), architecture, &[kernels, Path::new(include)])
        .map_err(|log| format!("{name} for {architecture}: {log}"))?;
    // Renamed when complete: another build may read it at the same time.
    let (file, partial) = (Path::new(file), Path::new(file).with_extension(format!("{}.partial", process::id())));
    fs::write(&partial, miniz_oxide::deflate::compress_to_vec(&image, LEVEL))
        .and_then(|()| fs::rename(&partial, file))
        .map_err(|error| format!("{}: {error}", file.display()))
}

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    if !arguments.is_empty() {
        if let Err(message) = compile_one(&arguments) {
            eprint!("{message}");
            process::exit(1);
        }
        return;
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_else(|| fail("OUT_DIR is not set")));
    // Of this checkout: the build script may come from a target folder that several share.
    let manifest = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| fail("CARGO_MANIFEST_DIR is not set"));
    let kernels = PathBuf::from(manifest).join("../../kernels");
    println!("cargo::rerun-if-env-changed=QUANTSPEC_KERNELS");
    println!("cargo::rerun-if-env-changed=PYO3_PYTHON");
    println!("cargo::rerun-if-changed={}", kernels.display());
    fs::write(out.join("shapes.rs"), shapes(&kernels)).unwrap_or_else(|error| fail(&error.to_string()));
    // CUDA exists on Linux and Windows only; other systems get no kernels.
    let system = env::var("CARGO_CFG_TARGET_OS").unwrap_or_default();
    // A part of the architectures, for development: with one, the kernels take less than a minute instead of three.
    let chosen = env::var("QUANTSPEC_KERNELS").unwrap_or_default();
    let names: Vec<&str> = chosen.split([' ', ',']).filter(|name| !name.is_empty()).collect();
    let architectures: Vec<&'static str> = match names[..] {
        [] | ["on"] => ARCHITECTURES.to_vec(),
        _ => {
            let ptx = ARCHITECTURES.last();
            ARCHITECTURES
                .into_iter()
                .chain([CHECKED])
                .filter(|known| names.contains(known) || ptx == Some(known))
                .collect()
        }
    };
    let wanted = match names[..] {
        ["off"] => false,
        [] | ["on"] => matches!(system.as_str(), "linux" | "windows"),
        _ => {
            if let Some(name) = names.iter().find(|name| **name != CHECKED && !ARCHITECTURES.contains(name)) {
                fail(&format!(
                    "QUANTSPEC_KERNELS has {name:?}; it may be on, off or some of {ARCHITECTURES:?} {CHECKED:?}"
                ));
            }
            matches!(system.as_str(), "linux" | "windows")
        }
    };
    let mut table = String::from("pub(crate) static IMAGES: &[Image] = &[\n");
    if wanted {
        let toolkit = toolkit();
        // OUT_DIR is <target>/<profile>/build/<package>/out. Images do not depend on the profile, so all profiles share them.
        let images = out.ancestors().nth(4).unwrap_or(&out).join("kernel-images");
        fs::create_dir_all(&images).unwrap_or_else(|error| fail(&format!("{}: {error}", images.display())));
        let compiled = compile(&toolkit, &architectures, &kernels, &images);
        for (stem, architecture, bytes, file) in compiled.into_iter().filter(|image| image.1 != CHECKED) {
            let number: String = architecture.chars().filter(char::is_ascii_digit).collect();
            let number = if architecture.starts_with("compute_") { "0".to_owned() } else { number };
            table += &format!(
                "    Image {{ stem: {stem:?}, architecture: {number}, bytes: {bytes}, deflated: include_bytes!({file:?}) }},\n"
            );
        }
    }
    table += "];\n";
    fs::write(out.join("images.rs"), table).unwrap_or_else(|error| fail(&error.to_string()));
}

/// Compiles one image in a subprocess: within a process NVRTC compiles one program at a time.
fn compile_apart(toolkit: &Toolkit, kernels: &Path, stem: &str, architecture: &str, file: &Path) {
    let done = env::current_exe().and_then(|this| {
        let paths = [toolkit.library.as_path(), &toolkit.include, kernels];
        process::Command::new(this).args(paths).args([stem, architecture]).arg(file).output()
    });
    match done {
        Ok(output) if output.status.success() => (),
        Ok(output) => fail(&String::from_utf8_lossy(&output.stderr)),
        Err(error) => fail(&format!("{stem}.cu for {architecture}: no process to compile it: {error}")),
    }
}

/// (stem, architecture, bytes, deflated file) of every image, in a fixed order.
fn compile(
    toolkit: &Toolkit,
    architectures: &[&'static str],
    kernels: &Path,
    images: &Path,
) -> Vec<(String, &'static str, usize, PathBuf)> {
    // The library is identified by name and size: isolated builds install the same package at a new path every time.
    let size = fs::metadata(&toolkit.library).map_or(0, |metadata| metadata.len());
    let compiler = format!("{:?} {size}", toolkit.library.file_name().unwrap_or_default());
    let headers: String = sources(kernels, "cuh").iter().map(|path| read(path)).collect();
    let units = sources(kernels, "cu");
    let jobs: Mutex<VecDeque<(&PathBuf, &'static str)>> = Mutex::new(
        units.iter().flat_map(|unit| architectures.iter().map(move |architecture| (unit, *architecture))).collect(),
    );
    let done = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let job = jobs.lock().unwrap_or_else(|lock| lock.into_inner()).pop_front();
                    let Some((unit, architecture)) = job else { break };
                    let stem = unit.file_stem().unwrap_or_default().to_string_lossy().into_owned();
                    let source = read(unit);
                    let key = hash(&[source.as_bytes(), headers.as_bytes(), compiler.as_bytes(), THIS]);
                    let file = images.join(format!("{stem}.{architecture}.{key:016x}"));
                    let inflated = || miniz_oxide::inflate::decompress_to_vec(&fs::read(&file).ok()?).ok();
                    let bytes = inflated().or_else(|| {
                        compile_apart(toolkit, kernels, &stem, architecture, &file);
                        inflated()
                    });
                    // Makes the last build's images the newest of the folder, even those an earlier build compiled.
                    let touched = fs::File::options().append(true).open(&file);
                    let touched = touched.and_then(|file| file.set_modified(SystemTime::now()));
                    touched.unwrap_or_else(|error| fail(&format!("{}: {error}", file.display())));
                    let bytes = bytes.unwrap_or_else(|| fail(&format!("{}: is not an image", file.display()))).len();
                    done.lock().unwrap_or_else(|lock| lock.into_inner()).push((stem, architecture, bytes, file));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(|lock| lock.into_inner());
    done.sort();
    done
}
