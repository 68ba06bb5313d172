//! Process groups over transports with injected faults.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};

use crate::transport::{Connections, FailureChannel, Transport, TransportError};
use crate::{Collective, CollectiveCall, Options, RankFailure, Reduce, Result, World, threads};

/// Thread transport whose connections of a two-rank subgroup are faulty.
struct Broken {
    sound: Arc<dyn Transport>,
    open: fn() -> Result<Box<dyn Connections>, TransportError>,
}

impl FailureChannel for Broken {
    fn rank(&self) -> usize {
        self.sound.rank()
    }

    fn who(&self, rank: usize) -> String {
        self.sound.who(rank)
    }

    fn fail(&self, failure: RankFailure) -> RankFailure {
        self.sound.fail(failure)
    }

    fn failure(&self) -> Option<RankFailure> {
        self.sound.failure()
    }

    fn await_failure(&self, within: Duration) -> Option<RankFailure> {
        self.sound.await_failure(within)
    }

    fn beat(&self) {
        self.sound.beat();
    }
}

impl Transport for Broken {
    fn open(&self, id: &str, members: &[usize]) -> Result<Box<dyn Connections>, TransportError> {
        if members.len() == 2 { (self.open)() } else { self.sound.open(id, members) }
    }

    fn set_current_call(&self, id: &str, call: Option<&CollectiveCall>) {
        self.sound.set_current_call(id, call);
    }
}

struct Panicking;

impl Connections for Panicking {
    fn exchange(&mut self, _send: &[&[u8]], _recv: &mut [&mut [u8]]) -> Result<(), TransportError> {
        panic!("index out of bounds")
    }
}

/// Splits four ranks so that only the subgroup of ranks 2 and 3 is faulty; returns the failure that both report.
#[track_caller]
fn check(
    open: fn() -> Result<Box<dyn Connections>, TransportError>,
    then: impl Fn(&dyn Collective) -> Result<()> + Sync,
) -> RankFailure {
    let options = Options { timeout: Duration::from_secs(60), record: false };
    let lists = [vec![0], vec![1], vec![2, 3]];
    let rank = |sound| {
        let world = World::open(Arc::new(Broken { sound, open }), 4, &options)?;
        world.run(|world| then(&*world.group().split("part", &lists)?))
    };
    let shared = threads::SharedWorld::new(options.timeout);
    let rank = &rank;
    let ended: Vec<Result<()>> = thread::scope(|scope| {
        let threads: Vec<_> =
            threads::transports(&shared, 4).map(|transport| scope.spawn(move || rank(transport))).collect();
        threads.into_iter().map(|thread| thread.join().expect("the rank does not panic")).collect()
    });
    let sent = |ended: &Result<()>| match ended {
        Err(crate::Error::Failed(failure)) => failure.clone(),
        other => panic!("{other:?}"),
    };
    let [third, fourth] = [2, 3].map(|rank| sent(&ended[rank]));
    assert_eq!(third, fourth);
    third
}

fn sum(group: &dyn Collective) -> Result<()> {
    group.all_reduce(&Tensor::ones(3, DType::F32, &Device::Cpu)?, Reduce::Sum).map(drop)
}

#[test]
fn a_rank_that_cannot_connect_is_named_by_its_world_rank() {
    let failure = check(|| Err(TransportError::ConnectTimeout(vec![1], Duration::from_secs(7))), sum);
    assert_eq!(failure.rank, 3);
    assert!(
        failure.message.contains("in group world of ranks [0, 1, 2, 3]: rank 3 did not connect within 7s"),
        "{failure}"
    );
    let refused = || Err(TransportError::Unreachable(1, std::io::ErrorKind::ConnectionRefused.into()));
    assert_eq!(check(refused, sum).rank, 3);
}

#[test]
fn a_panic_in_an_operation_ends_the_world() {
    let failure = check(|| Ok(Box::new(Panicking)), |group| if group.size() == 2 { sum(group) } else { Ok(()) });
    let what = format!("finish all_reduce 1 (sum, f32 [3]) in group part of ranks [2, 3]: rank {}", failure.rank);
    assert!(failure.message.starts_with(&what), "{failure}");
    assert!(failure.message.contains(": panicked: index out of bounds (seen by rank "), "{failure}");
}
