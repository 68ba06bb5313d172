//! Benchmark of every op, forward and backward, compared with the device's limits:
//! `ops-bench --device cuda --json OUT`.
//!
//! Each run also measures the ceilings: a device-to-device copy and a square bf16 matmul. `cases.rs` has formulas for
//! the minimum bytes and FLOPs of an op. They and its time give its fraction of the ceiling.

mod cases;
mod fp8;
mod grouped;
mod host;
mod linear;
mod matmuls;
mod measure;
mod moe;
mod progress;

use std::path::PathBuf;

use anyhow::{Context, Result};
use candle_core::Device;
use candlewick_ops::{
    DeviceChoice, Fp8Kernels, GroupedGemmImpl, GroupedTile, TileUse, force_grouped_tile, gpus, grouped_tiles,
};
use clap::Parser;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use cases::{BenchCase, BenchCost, Set};
use matmuls::MatmulTimes;
use measure::{BenchRun, Effort, Timing};
use progress::{Progress, within};

/// The allocator of the programs. Fresh pages would cost a CPU more time than the ops.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Keeps freed memory for the next run.
fn keep_memory() {
    // SAFETY: setting an option has no preconditions. 15 is `mi_option_purge_delay`.
    unsafe { libmimalloc_sys::mi_option_set(15, -1) };
}

#[derive(Parser)]
struct Args {
    /// Device: auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Write the measurements to this JSON file, after each op
    #[arg(long)]
    json: Option<PathBuf>,
    /// Continue the file of --json: skip its cases. The case that ended the process before counts as failed
    #[arg(long, requires = "json")]
    resume: bool,
    /// Seconds that a case may take. After them the process aborts; --resume continues
    #[arg(long)]
    case_seconds: Option<f64>,
    /// Read the device's ceilings from this JSON file; measure and write them if it is missing
    #[arg(long)]
    ceilings: Option<PathBuf>,
    /// Run only ops whose names contain this text
    #[arg(long, default_value = "")]
    filter: String,
    /// Use tiny shapes, for a trial run
    #[arg(long)]
    quick: bool,
    /// Implementation of the moe layer's experts
    #[arg(long, value_enum, default_value_t = Experts::Auto)]
    experts: Experts,
    /// Run grouped matmuls and moe layers by our kernels and by CUTLASS, and dense matmuls of equal FLOPs, instead of the ops
    #[arg(long, conflicts_with = "fp8")]
    grouped: bool,
    /// Output tile of CUTLASS, instead of the one for the sizes. With --grouped, runs the tile's matmuls alone
    #[arg(long, value_name = "NAME", value_parser = tiles())]
    tile: Option<&'static GroupedTile>,
    /// Run linear layers in FP8 and in bf16, and quantization, instead of the ops
    #[arg(long)]
    fp8: bool,
    /// Measure the host's time for the linear layers of a training step instead, with cached descriptors and without
    #[arg(long, conflicts_with = "fp8")]
    host: bool,
    /// Time the matmuls that standard input requests: a line has t, k, n and `burst` or `sustained`
    #[arg(long, conflicts_with_all = ["fp8", "host", "grouped"])]
    matmuls: bool,
    /// Accepted because cargo bench passes it
    #[arg(long, hide = true)]
    bench: bool,
}

/// An implementation of the experts' matmuls, by its name in recipes.
#[derive(Clone, Copy, clap::ValueEnum)]
enum Experts {
    Auto,
    Fused,
    Cublas,
    Cutlass,
}

impl From<Experts> for GroupedGemmImpl {
    fn from(experts: Experts) -> Self {
        match experts {
            Experts::Auto => Self::Auto,
            Experts::Fused => Self::Fused,
            Experts::Cublas => Self::Cublas,
            Experts::Cutlass => Self::Cutlass,
        }
    }
}

/// Returns the parser of a tile's name. The help lists the tiles of the table.
fn tiles() -> impl TypedValueParser<Value = &'static GroupedTile> {
    let described = grouped_tiles().iter().map(|tile| {
        let of = match tile.usage {
            TileUse::Multiply => "forward and dx",
            TileUse::GradW => "dw",
        };
        let GroupedTile { name, shape, cluster, schedule, .. } = tile;
        PossibleValue::new(*name).help(format!("{of}: {shape}, clusters of {cluster}, {}", schedule.to_lowercase()))
    });
    let named = |name: String| GroupedTile::named(&name).ok_or("the parser accepts the names of tiles only");
    PossibleValuesParser::new(described).try_map(named)
}

/// Ceilings of the device, in bytes and FLOPs per second.
#[derive(Clone, Copy, Serialize, Deserialize)]
struct Ceilings {
    copy_bytes_per_second: f64,
    product_flops_per_second: f64,
}

#[derive(Serialize)]
struct Row {
    /// Op, direction and sizes.
    case: String,
    op: &'static str,
    what: &'static str,
    shape: Map<String, Value>,
    /// Number of rotating sets of inputs and outputs.
    n_sets: usize,
    /// Timing of a backward without its forward.
    #[serde(flatten)]
    timing: Timing,
    /// Milliseconds of the forward that were subtracted.
    forward_ms: f64,
    bytes: f64,
    flops: f64,
    gb_s: f64,
    tflop_s: f64,
    bound: &'static str,
    fraction_of_ceiling: f64,
}

fn main() -> Result<()> {
    keep_memory();
    let args = Args::parse();
    if let Some(folder) = std::env::var_os("CANDLEWICK_KERNELS") {
        candlewick_ops::replace_kernels(std::path::Path::new(&folder))?;
    }
    if let Some(folder) = std::env::var_os("CANDLEWICK_CUTLASS") {
        candlewick_ops::load_cutlass_from(std::path::Path::new(&folder))?;
    }
    args.tile.into_iter().for_each(force_grouped_tile);
    if let Some(name) = std::env::var_os("CANDLEWICK_FP8_QUANTIZE_KERNELS") {
        let kernels: Fp8Kernels = name.to_string_lossy().parse().map_err(anyhow::Error::msg)?;
        kernels.select();
    }
    let device = args.device.open()?;
    if args.host {
        return measure_host(&args, &device);
    }
    if args.matmuls {
        let times = if args.quick { MatmulTimes::QUICK } else { MatmulTimes::FULL };
        return times.answer(&device, std::io::stdin().lock(), std::io::stdout());
    }
    measure_ops(&args, &device)
}

fn measure_ops(args: &Args, device: &Device) -> Result<()> {
    let effort = if args.quick { Effort::QUICK } else { Effort::FULL };
    let ceilings = args.ceilings(device, effort)?;
    println!(
        "{}: copies {:.0} GB/s, multiplies {:.1} TFLOP/s",
        name_of(device),
        ceilings.copy_bytes_per_second / 1e9,
        ceilings.product_flops_per_second / 1e12
    );
    let mut progress = args.progress(device, ceilings)?;
    for case in args.cases(device).into_iter().filter(|case| case.op.contains(&args.filter)) {
        let label = case.label();
        if progress.has(&label) {
            continue;
        }
        progress.begin(&label)?;
        match within(args.case_seconds, || measure(&case, device, effort, ceilings)) {
            Ok(row) => {
                println!("{label:84} {}", row.line());
                progress.end("rows", json!(row))?;
            }
            Err(error) => {
                println!("{label:84} failed: {error:#}");
                progress.end("failed", json!({ "case": label, "error": format!("{error:#}") }))?;
                // A kernel's error stays in the process, and every later case would fail.
                if device.synchronize().is_err() {
                    std::process::abort();
                }
            }
        }
    }
    anyhow::ensure!(!progress.has_failures(), "some ops failed");
    Ok(())
}

impl Args {
    fn progress(&self, device: &Device, ceilings: Ceilings) -> Result<Progress> {
        let kernels = Fp8Kernels::selected().name();
        let tile = self.tile.map(|tile| tile.name);
        let fields = json!({ "device": name_of(device), "fp8_kernels": kernels, "tile": tile, "ceilings": ceilings });
        match self.resume {
            true => Ok(Progress::resume(self.json.clone(), fields)?),
            false => Ok(Progress::new(self.json.clone(), fields)),
        }
    }

    /// Returns the ceilings of the file, or those measured now.
    fn ceilings(&self, device: &Device, effort: Effort) -> Result<Ceilings> {
        if let Some(file) = self.ceilings.as_deref().filter(|file| file.is_file()) {
            return Ok(serde_json::from_value(progress::read(file)?)?);
        }
        let ceilings = ceilings(device, effort, self)?;
        if let Some(file) = &self.ceilings {
            std::fs::write(file, json!(ceilings).to_string())
                .with_context(|| format!("failed to write {}", file.display()))?;
        }
        Ok(ceilings)
    }

    fn cases(&self, device: &Device) -> Vec<BenchCase> {
        match (self.fp8, self.grouped, self.quick) {
            (true, _, false) => fp8::all(),
            (true, _, true) => fp8::tiny(),
            (_, true, false) => grouped::all(device, self.tile),
            (_, true, true) => grouped::tiny(device, self.tile),
            (_, _, false) => cases::all(self.experts.into()),
            (_, _, true) => cases::tiny(self.experts.into()),
        }
    }
}

fn measure_host(args: &Args, device: &Device) -> Result<()> {
    let rows = if args.quick { host::HostSteps::QUICK } else { host::HostSteps::FULL }.run(device)?;
    rows.iter().for_each(|row| println!("{}", row.line()));
    if let Some(path) = &args.json {
        let found = json!({ "device": name_of(device), "rows": rows });
        std::fs::write(path, serde_json::to_string_pretty(&found)?)
            .with_context(|| format!("failed to write {}", path.display()))?;
    }
    Ok(())
}

fn name_of(device: &Device) -> String {
    let gpu = if device.is_cuda() { gpus().into_iter().next() } else { None };
    gpu.map_or_else(|| "CPU".to_owned(), |gpu| gpu.name)
}

fn ceilings(device: &Device, effort: Effort, args: &Args) -> Result<Ceilings> {
    let (n_bytes, n) = if args.quick { (1 << 20, 128) } else { (2 << 30, 8192) };
    let seconds = |case: BenchCase| Ok::<_, anyhow::Error>((case.cost, timed(&case, device, effort)?.0.ms / 1e3));
    let (copy, copy_seconds) = seconds(cases::device_copy(n_bytes))?;
    let (product, product_seconds) = seconds(cases::square_product(n))?;
    Ok(Ceilings {
        copy_bytes_per_second: copy.bytes / copy_seconds,
        product_flops_per_second: product.flops / product_seconds,
    })
}

/// Times a case, and subtracts its forward.
fn timed(case: &BenchCase, device: &Device, effort: Effort) -> Result<(Timing, f64, usize)> {
    let n_sets = effort.n_sets(case.cost.bytes);
    let sets = (0..n_sets).map(|_| (case.make)(device)).collect::<candle_core::Result<Vec<Set>>>()?;
    let (runs, forwards): (Vec<BenchRun>, Vec<Option<BenchRun>>) =
        sets.into_iter().map(|set| (set.run, set.forward)).unzip();
    let forwards: Vec<BenchRun> = forwards.into_iter().flatten().collect();
    let timing = measure::time(device, &runs, effort)?;
    let forward_ms = if forwards.is_empty() { 0.0 } else { measure::time(device, &forwards, effort)?.ms };
    Ok((timing, forward_ms, n_sets))
}

fn measure(case: &BenchCase, device: &Device, effort: Effort, ceilings: Ceilings) -> Result<Row> {
    let (timing, forward_ms, n_sets) = timed(case, device, effort)?;
    let own = |ms: f64| (ms - forward_ms).max(1e-6);
    let timing = Timing { ms: own(timing.ms), ms_min: own(timing.ms_min), ms_max: own(timing.ms_max), ..timing };
    let BenchCost { bytes, flops } = case.cost;
    let seconds = timing.ms / 1e3;
    let at_least = [bytes / ceilings.copy_bytes_per_second, flops / ceilings.product_flops_per_second];
    Ok(Row {
        case: case.label(),
        op: case.op,
        what: case.what,
        shape: case.shape.iter().map(|(name, n)| ((*name).to_owned(), json!(n))).collect(),
        n_sets,
        timing,
        forward_ms,
        bytes,
        flops,
        gb_s: bytes / seconds / 1e9,
        tflop_s: flops / seconds / 1e12,
        bound: if at_least[0] >= at_least[1] { "memory" } else { "compute" },
        fraction_of_ceiling: at_least[0].max(at_least[1]) / seconds,
    })
}

impl BenchCase {
    /// Returns op, direction and sizes.
    pub(crate) fn label(&self) -> String {
        let shape: Vec<String> = self.shape.iter().map(|(name, n)| format!("{name}={n}")).collect();
        format!("{} {} {}", self.op, self.what, shape.join(" "))
    }
}

impl Row {
    fn line(&self) -> String {
        let speed = match self.bound {
            "memory" => format!("{:8.1} GB/s", self.gb_s),
            _ => format!("{:8.1} TFLOP/s", self.tflop_s),
        };
        format!("{:9.4} ms {speed} {:5.1}%", self.timing.ms, 100.0 * self.fraction_of_ceiling)
    }
}
