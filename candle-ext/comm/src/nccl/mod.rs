//! Backend over NVIDIA's NCCL, for ranks with one GPU each. NCCL is loaded when the first world is joined.
//!
//! The ranks rendezvous in a [`store`](crate::store), which also holds NCCL's unique ids, failures and heartbeats. Each group
//! is an NCCL communicator with its own stream and thread. Operations and their consumers wait for each other on the device,
//! and the host does not block. CPU tensors are copied through the GPU.
//!
//! The groups of a device launch in the order of the calls, so all ranks launch in one order if they call their groups in one
//! order. NCCL connects two ranks in the first launch that needs the connection. That launch waits for the other rank, and
//! later calls of this rank to any group wait for the launch.
//!
//! Differences from the other backends:
//!
//! * NCCL reduces in its own order, which is the same on all ranks but not rank order.
//! * Mismatched collectives are detected by the timeout.
//! * The timeout covers a whole operation, from the time at which this rank's inputs are ready.
//! * A received tensor of another dtype or shape is detected by the description sent with it, after the exchange or while it
//!   hangs. No exchange waits for a description.
//! * Sums of f16 and bf16 are computed in f32, in tensors twice as large.

mod api;
mod communicator;
mod description;
mod group;
mod launch_order;
mod memory;
mod worker;

use std::sync::Arc;

use candle_core::{CudaDevice, Device};

use crate::call::CallTrace;
use crate::peer::PeerInfo;
use crate::rendezvous::PeerRendezvous;
use crate::store::{Client, Server};
use crate::thread_pool::ThreadPool;
use crate::watchdog::Watchdog;
use crate::{Options, Result, World};
use group::NcclGroup;
use worker::{NcclRank, NcclWorker};

/// Joins the world of `size` ranks as rank `rank` with the GPU `device`, by a rendezvous in `store`.
///
/// Returns when all ranks have joined, and fails if they have not within `options.timeout`. A world may have one rank. `host`
/// is the store's server if this rank hosts it; it runs until the other ranks have left.
///
/// Each run and each restart needs its own keys: see [`Client::with_prefix`].
pub fn join(
    store: &Client,
    rank: usize,
    size: usize,
    device: &Device,
    host: Option<Server>,
    options: Options,
) -> Result<World> {
    join_peers(&PeerRendezvous::new(store.with_prefix("nccl"), rank, size, options.timeout)?, device, host, options)
}

/// Joins the world of a rendezvous.
pub(crate) fn join_peers(
    rendezvous: &PeerRendezvous,
    device: &Device,
    host: Option<Server>,
    options: Options,
) -> Result<World> {
    let (rank, size) = (rendezvous.rank(), rendezvous.size());
    let Device::Cuda(cuda) = device else {
        let why = format!("NCCL needs a GPU, and this rank's device is {:?}", device.location());
        return Err(rendezvous.join_error(why));
    };
    let refuse = |why| rendezvous.join_error(why);
    api::nccl().map_err(refuse)?;
    let own = PeerInfo::this_process(rank, size, uuid(cuda).map_err(refuse)?);
    let peers = rendezvous.exchange_peers(&own, |_| Ok(()))?;
    check_devices(&peers).map_err(refuse)?;
    let watchdog = Watchdog::start(rendezvous.store(), own, peers, options.timeout)?;
    let watchdog = Arc::new(watchdog.with_host(host));
    let (threads, trace) = (Arc::<ThreadPool>::default(), CallTrace::new(options.record));
    let (all_ranks, order) = ((0..size).collect::<Vec<_>>(), Arc::default());
    let shared = NcclRank { watchdog: Arc::clone(&watchdog), device: cuda.clone(), order };
    let worker = NcclWorker::open(&shared, "world", "world".into(), &all_ranks);
    let worker = worker.map_err(|error| error.fail_connect(&*watchdog, &all_ranks))?;
    let group = NcclGroup::new(worker, device, trace.clone(), Arc::clone(&threads))?;
    Ok(World::from_group(Arc::new(group), watchdog, options.timeout, threads, trace))
}

/// Returns the UUID of a rank's GPU.
fn uuid(device: &CudaDevice) -> Result<String, String> {
    let uuid = device.cuda_stream().context().uuid().map_err(|error| format!("read the UUID of its GPU: {error}"))?;
    Ok(uuid.bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect())
}

/// Fails if two ranks share a GPU.
fn check_devices(peers: &[PeerInfo]) -> Result<(), String> {
    let shared = peers.iter().enumerate().find_map(|(at, other)| {
        let one = peers[..at].iter().find(|one| one.address == other.address)?;
        Some((one, other))
    });
    shared.map_or(Ok(()), |(one, other)| {
        Err(format!(
            "{one} and {other} have the same GPU, and NCCL needs one per rank; set ddp_backend: staged to share it"
        ))
    })
}
