//! `ckpt-run plan`: the interval that `--interval auto` would choose, and its calculation.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use comfy_table::{Table, TableStyle};
use serde::Serialize;

use super::global::{Failure, Global, open};
use super::print;
use crate::config::{Config, Override, format_percent, parse_duration};
use crate::history::percent;
use crate::supervisor::policy::interval::{Chosen, Cost, Rules, Seen, choose, rough};
use crate::supervisor::seen_in;

/// Values that replace those of the store and the settings.
#[derive(Debug, Args)]
pub(super) struct PlanArguments {
    /// Cost of a snapshot [default: the freeze of the run's images]
    #[arg(long, value_name = "TIME", value_parser = time)]
    freeze: Option<Duration>,
    /// Computing time assumed between two failures
    #[arg(long, value_name = "TIME")]
    mtbf: Option<String>,
    /// Largest share of the job's time that freezes may take: "1%"
    #[arg(long, value_name = "PERCENT")]
    max_overhead: Option<String>,
}

/// The calculation as data. Times are in seconds, shares from 0 to 1.
#[derive(Debug, Serialize)]
struct Plan {
    interval_seconds: f64,
    reason: &'static str,
    cost_seconds: f64,
    cost_is_measured: bool,
    mtbf_seconds: f64,
    mtbf_assumed_seconds: f64,
    computed_seconds: f64,
    failures: u64,
    optimum_seconds: f64,
    least_seconds: f64,
    max_overhead: f64,
    overhead: f64,
    done_again: f64,
}

fn time(text: &str) -> Result<Duration, String> {
    parse_duration(text).map_err(|error| error.to_string())
}

pub(super) fn run(global: &Global, arguments: PlanArguments) -> Result<ExitCode, Failure> {
    let flags = [
        ("snapshot.mtbf", "--mtbf", arguments.mtbf),
        (
            "snapshot.max_overhead",
            "--max-overhead",
            arguments.max_overhead,
        ),
    ];
    let overrides = flags.into_iter().filter_map(|(key, flag, value)| {
        let value = value?;
        Some(Override { key, flag, value })
    });
    let config = global.load(overrides.collect())?.config;
    let seen = seen(&config, arguments.freeze)?;
    let rules = Rules::from(&config.snapshot);
    let chosen = choose(rules, seen);
    if global.json {
        return print::print_json(&data(rules, seen, &chosen));
    }
    let freeze = match (arguments.freeze, chosen.measured) {
        (Some(_), _) => "as given",
        (None, true) => "mean freeze of the run's newest images",
        (None, false) => "assumed, because there is no image yet; --freeze TIME sets it",
    };
    print::print(&format!(
        "{}\n",
        table(rules, seen, &chosen, freeze).trim_fmt()
    ))
}

/// Returns the measurements of the store, if there is one.
fn seen(config: &Config, freeze: Option<Duration>) -> Result<Seen, Failure> {
    let mut seen = if config.store.exists() {
        seen_in(&open(config)?)?
    } else {
        Seen::default()
    };
    if let Some(freeze) = freeze {
        seen.cost = Some(Cost {
            freeze,
            slowdown: Duration::ZERO,
            writing: Duration::ZERO,
        });
    }
    Ok(seen)
}

fn data(rules: Rules, seen: Seen, chosen: &Chosen) -> Plan {
    Plan {
        interval_seconds: chosen.interval.as_secs_f64(),
        reason: chosen.reason.as_str(),
        cost_seconds: chosen.cost.as_secs_f64(),
        cost_is_measured: chosen.measured,
        mtbf_seconds: chosen.mtbf.as_secs_f64(),
        mtbf_assumed_seconds: rules.mtbf.as_secs_f64(),
        computed_seconds: seen.computed.as_secs_f64(),
        failures: seen.failures,
        optimum_seconds: chosen.optimum.as_secs_f64(),
        least_seconds: chosen.least.as_secs_f64(),
        max_overhead: rules.max_overhead,
        overhead: chosen.overhead(),
        done_again: chosen.lost(),
    }
}

fn table(rules: Rules, seen: Seen, chosen: &Chosen, freeze: &str) -> Table {
    let mtbf = format!(
        "({} assumed + {} computed) / (1 + {} failures)",
        rough(rules.mtbf),
        rough(seen.computed),
        seen.failures
    );
    let least = format!(
        "C / snapshot.max_overhead ({})",
        format_percent(rules.max_overhead)
    );
    let rows = [
        ("C, cost of a snapshot", rough(chosen.cost), freeze),
        ("M, time between failures", rough(chosen.mtbf), &mtbf),
        (
            "optimum (Young, Daly)",
            rough(chosen.optimum),
            "sqrt(2 C M) (1 + sqrt(C/2M)/3 + C/2M/9) - C",
        ),
        ("at least", rough(chosen.least), &least),
        ("interval", rough(chosen.interval), chosen.reason.as_str()),
        (
            "snapshots take",
            percent(chosen.overhead()),
            "of the job's time",
        ),
        (
            "repeated work",
            percent(chosen.lost()),
            "of the job's time, after failures",
        ),
    ];
    let mut table = Table::new();
    table.load_style(TableStyle::new());
    for (name, value, meaning) in rows {
        table.add_row([name, &value, meaning]);
    }
    table
}
