//! How the launchers of a job's nodes meet: at a store that one of them hosts, which the workers use too. With one node
//! the same happens with nobody else.
//!
//! Keys are `launch/JOB/ROUND/...`. `place` says where the store is, `seats` who takes part in a round, `watch` what the
//! others are told while workers run.

mod place;
mod seats;
mod watch;

use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use candlewick_comm::place::Master;
use candlewick_comm::store::{Client, Error, Server};

use crate::endpoint::{Endpoint, is_this_machine};
use crate::event::{Event, Peer};
use crate::host::Host;
use crate::plan::{Plan, Rendezvous};
use crate::round::{Member, Round};
use crate::values::NodeRange;

use place::{address_of, bind, connect};
use seats::{Entry, Terms};
pub use watch::Watch;
use watch::{Pulses, Questions};

/// A node at the store.
#[derive(Debug)]
pub struct Meeting {
    /// Serves the other launchers, and the workers of the first round; kept until they have left.
    server: Option<Server>,
    store: Client,
    /// Where `server` is.
    address: Endpoint,
    is_only: bool,
    /// Serves the workers of the present round, if it is not the first.
    workers_server: Option<Server>,
    nodes: NodeRange,
    rendezvous: Rendezvous,
    monitor_interval: Duration,
    keep_alive: Duration,
    own: Entry,
    /// What this node is in the present round.
    seat: Option<Seat>,
}

/// A place in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seat {
    round: usize,
    group_rank: usize,
    n_nodes: usize,
}

/// Why the nodes did not meet.
#[derive(Debug, thiserror::Error)]
pub enum MeetingError {
    /// The port of the store is taken.
    #[error(
        "host the store at {endpoint}: the port is in use, perhaps by another job \
         (--standalone takes a free one, --master-port or --rdzv-endpoint another)"
    )]
    PortInUse {
        /// Where.
        endpoint: Endpoint,
    },
    /// The store cannot be reached, or does not answer.
    #[error("meet at {endpoint}: {source}")]
    Store {
        /// Where.
        endpoint: Endpoint,
        /// What the store's client says.
        source: Box<Error>,
    },
    /// Two launchers say they are the same node.
    #[error("be node {node_rank}: another launcher of this job has that --node-rank, {other}")]
    NodeRankTaken {
        /// The number.
        node_rank: usize,
        /// The other's machine.
        other: String,
    },
    /// Two launchers were not started alike.
    #[error("agree with the launcher on {other}: {difference}")]
    Differs {
        /// The other's machine.
        other: String,
        /// In what.
        difference: String,
    },
    /// Nodes did not come.
    #[error("meet {min} nodes at {endpoint} within {timeout:?}: {missing}")]
    Missing {
        /// How many are needed.
        min: usize,
        /// Where.
        endpoint: Endpoint,
        /// How long was waited.
        timeout: Duration,
        /// Who is missing.
        missing: String,
    },
    /// A signal came while the nodes were waited for.
    #[error("meet the other nodes: stopped by signal {0}")]
    Interrupted(i32),
}

type Result<T> = std::result::Result<T, MeetingError>;

/// Looks for a signal that ends the wait.
pub type Interrupted<'a> = &'a dyn Fn() -> Option<i32>;

/// How long a wait lasts before a signal is looked for.
pub const SLICE: Duration = Duration::from_millis(50);

impl Meeting {
    /// Hosts the store, or connects to it.
    pub fn open(plan: &Plan, host: &Host, interrupted: Interrupted) -> Result<Self> {
        let (endpoint, timeout, is_host, is_certain) = match &plan.rendezvous {
            Rendezvous::Static { master, node_rank, timeout } => (master, *timeout, *node_rank == 0, true),
            Rendezvous::Dynamic(dynamic) => {
                let is_host = dynamic.is_host.unwrap_or_else(|| is_this_machine(&dynamic.endpoint.host, &host.name));
                (&dynamic.endpoint, dynamic.join, is_host, dynamic.is_host.is_some())
            }
        };
        let is_only = plan.nodes.max <= 1;
        let server = match is_host.then(|| bind(endpoint, is_only)).transpose() {
            // Two launchers of one machine find that both could host; one of them does.
            Err(MeetingError::PortInUse { .. }) if !is_certain && !is_only => None,
            server => server?,
        };
        let address = address_of(endpoint, server.as_ref(), is_only);
        let store = connect(&address, timeout, plan.keep_alive.max(SHORTEST_ANSWER), interrupted)?;
        let own = Member {
            host: plan.local_addr.clone().unwrap_or_else(|| host.name.clone()),
            n_workers: plan.local_world_size,
            role: plan.role.clone(),
        };
        Ok(Self {
            server,
            store: store.with_prefix(&format!("launch/{}", plan.run_id)),
            address,
            is_only,
            workers_server: None,
            nodes: plan.nodes,
            rendezvous: plan.rendezvous.clone(),
            monitor_interval: plan.monitor_interval,
            keep_alive: plan.keep_alive,
            own: Entry::new(own, Terms::of(plan)),
            seat: None,
        })
    }

    /// Waits until the nodes have agreed on who takes part in the next round, and returns it with its number.
    pub fn next_round(&mut self, interrupted: Interrupted) -> Result<(usize, Round)> {
        let before = self.seat.take().map(|seat| seat.round);
        let (seat, members) = match self.rendezvous.clone() {
            Rendezvous::Static { node_rank, timeout, .. } => {
                self.take_given_seat(before, node_rank, timeout, interrupted)?
            }
            Rendezvous::Dynamic(dynamic) => self.take_free_seat(before, &dynamic, interrupted)?,
        };
        self.seat = Some(seat);
        let port = self.workers_port(seat, interrupted)?;
        let master = Master { addr: self.address.host.clone(), port, agent_hosts_store: true };
        Ok((seat.round, Round { group_rank: seat.group_rank, members, master }))
    }

    /// The workers of a later round get a store of their own: what those before them left in theirs, addresses of
    /// processes that are dead, would lead them astray.
    fn serve_workers_of(&mut self, round: usize) -> Result<()> {
        if round == 0 || self.server.is_none() {
            return Ok(());
        }
        let server = bind(&Endpoint { host: self.address.host.clone(), port: 0 }, self.is_only)?;
        let seat = Seat { round, group_rank: 0, n_nodes: 0 };
        let port = server.port().to_string();
        self.workers_server = Some(server);
        self.store.set(&seat.key("port"), port.as_bytes()).map_err(|source| self.lost(source))
    }

    fn workers_port(&self, seat: Seat, interrupted: Interrupted) -> Result<u16> {
        if seat.round == 0 {
            return Ok(self.address.port);
        }
        let key = seat.key("port");
        let deadline = Instant::now() + self.patience();
        while !self.store.check(&[&key]).map_err(|source| self.lost(source))? {
            if Instant::now() >= deadline {
                return Err(self.missing(self.patience(), "the host's store for the workers".into()));
            }
            self.pause(interrupted)?;
        }
        let port = self.store.get(&key).map_err(|source| self.lost(source))?;
        let port = String::from_utf8_lossy(&port).parse();
        port.map_err(|_| self.missing(self.patience(), "a number for the port of the workers' store".into()))
    }

    /// Tells the others what happened here. Of each kind the first is believed.
    pub fn tell(&self, peer: &Peer) {
        let (Some(seat), Some((name, text))) = (self.seat, watch::told(peer)) else { return };
        if self.is_host() && !matches!(peer, Peer::Failed(_)) {
            self.close(seat);
        }
        // Without a store the others notice by themselves.
        let _ = self.store.compare_set(&seat.key(name), b"", format!("{} {text}", seat.group_rank).as_bytes());
    }

    /// Says that there will be no other round, because its store will be gone.
    fn close(&self, seat: Seat) {
        let _ = self.store.set(&seat.key("closed"), b"1");
    }

    /// Looks after the other nodes while workers run; what happens there goes to `events`.
    pub fn watch(&self, events: Sender<Event>) -> Result<Option<Watch>> {
        let Some(seat) = self.seat.filter(|_| self.nodes.max > 1) else { return Ok(None) };
        let store = self.store.reconnect_within(self.store.timeout()).map_err(|source| self.lost(source))?;
        Ok(Some(Watch::start(store, seat, self.questions(), events)))
    }

    /// Says whether this node hosts the store.
    pub fn is_host(&self) -> bool {
        self.server.is_some()
    }

    /// Says that this node's workers have ended well.
    pub fn say_done(&self) {
        if let Some(seat) = self.seat {
            // Without a store nobody asks.
            let _ = self.store.add(&seat.key("done"), 1);
        }
    }

    /// Says whether workers of other nodes run: they may need this node's store or ranks.
    pub fn are_others_busy(&self) -> bool {
        let n_done = |seat: Seat| self.store.add(&seat.key("done"), 0);
        self.seat.is_some_and(|seat| n_done(seat).is_ok_and(|n_done| n_done < seat.n_nodes as i64))
    }

    /// Says whether the job goes on when another node has left for good.
    pub fn can_go_on(&self) -> bool {
        let is_closed = |seat: Seat| self.store.check(&[&seat.key("closed")]).unwrap_or(true);
        let is_dynamic = matches!(self.rendezvous, Rendezvous::Dynamic(_));
        is_dynamic && self.seat.is_some_and(|seat| seat.n_nodes > self.nodes.min && !is_closed(seat))
    }

    /// Waits for another node to say that its workers failed, as long as a living node takes at most.
    pub fn wait_for_failure(&self, interrupted: Interrupted) -> Option<String> {
        let seat = self.seat.filter(|seat| seat.n_nodes > 1)?;
        let deadline = Instant::now() + self.keep_alive;
        while Instant::now() < deadline && interrupted().is_none() {
            if let Some(text) = watch::heard(&self.store, seat, "failed").ok()? {
                return Some(text);
            }
            std::thread::sleep(SLICE);
        }
        None
    }

    /// Goes for good. The host waits until the others have gone, so that they hear what there is to hear.
    pub fn leave(self, interrupted: Interrupted) {
        let Some(seat) = self.seat else { return };
        let _ = self.store.set(&seat.node_key("gone", seat.group_rank), b"1");
        if !self.is_host() {
            return;
        }
        self.close(seat);
        let mut pulses = Pulses::new(seat, self.keep_alive);
        while pulses.are_others_here(&self.store) && interrupted().is_none() {
            std::thread::sleep(SLICE);
        }
    }

    fn questions(&self) -> Questions {
        let n_most = match self.rendezvous {
            Rendezvous::Static { .. } => None,
            Rendezvous::Dynamic(_) => Some(self.nodes.max),
        };
        Questions { n_most, interval: self.monitor_interval, keep_alive: self.keep_alive }
    }

    /// How long the others are waited for.
    fn patience(&self) -> Duration {
        match &self.rendezvous {
            Rendezvous::Static { timeout, .. } => *timeout,
            Rendezvous::Dynamic(dynamic) => dynamic.join,
        }
    }

    fn lost(&self, source: Error) -> MeetingError {
        MeetingError::Store { endpoint: self.address.clone(), source: Box::new(source) }
    }

    fn missing(&self, timeout: Duration, missing: String) -> MeetingError {
        MeetingError::Missing { min: self.nodes.min, endpoint: self.address.clone(), timeout, missing }
    }

    fn pause(&self, interrupted: Interrupted) -> Result<()> {
        std::thread::sleep(SLICE);
        interrupted().map_or(Ok(()), |signal| Err(MeetingError::Interrupted(signal)))
    }
}

/// A host that cannot be reached is waited for as long as a node may be silent; one under load may need as long as this.
const SHORTEST_ANSWER: Duration = Duration::from_secs(5);

impl Seat {
    fn key(&self, name: &str) -> String {
        format!("{}/{name}", self.round)
    }

    fn node_key(&self, name: &str, group_rank: usize) -> String {
        format!("{}/{name}/{group_rank}", self.round)
    }
}
