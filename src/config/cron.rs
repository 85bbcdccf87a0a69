//! Cron expressions in crontab's notation, translated for crate `cron`.
//!
//! Crate `cron` differs from crontab in two ways that are corrected here, because a schedule would otherwise silently
//! run on other days. Crate `cron` counts Sunday as 1, crontab as 0 or 7. If both the day of the month and the day of
//! the week are given, the crate requires both to match, crontab either. This module only transforms text; the schedule
//! computes the times.

use std::str::FromStr;

use cron::Schedule;

use super::Invalid;
use super::units::shown;

/// Limit on an expression's length. No handwritten expression is longer, and parsing stays cheap.
const LENGTH_MAX: usize = 256;

/// A parsed cron expression of 5, 6 or 7 fields, or a word such as `@daily`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CronExpression {
    either: Vec<Schedule>,
}

impl CronExpression {
    /// Parses `text`; an expression that never matches is an error too.
    ///
    /// # Errors
    /// [`Invalid::Cron`] with the reason.
    pub fn parse(text: &str) -> Result<Self, Invalid> {
        let refused = |reason: String| Invalid::Cron {
            given: shown(text),
            reason,
        };
        if text.len() > LENGTH_MAX {
            return Err(refused(format!("longer than {LENGTH_MAX} bytes")));
        }
        let either = rewrite(text)
            .map_err(&refused)?
            .iter()
            .map(|expression| expression.parse::<Schedule>())
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| refused(last_line(&error.to_string())))?;
        if either.iter().all(never_happens) {
            return Err(refused("there is no such day".to_owned()));
        }
        Ok(Self { either })
    }

    /// Returns the schedules whose union is the expression's times.
    #[must_use]
    pub fn schedules(&self) -> &[Schedule] {
        &self.either
    }
}

impl FromStr for CronExpression {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        Self::parse(text)
    }
}

/// Returns the expressions of crate `cron` whose union means `text`.
fn rewrite(text: &str) -> Result<Vec<String>, String> {
    let mut fields: Vec<&str> = text.split_whitespace().collect();
    match fields.len() {
        1 if text.trim_start().starts_with('@') => return Ok(vec![text.to_owned()]),
        5 => fields.insert(0, "0"),
        6 | 7 => {}
        count => {
            return Err(format!(
                "{count} fields instead of 5 (minute hour day month weekday), \
                 6 (second first) or 7 (year last)"
            ));
        }
    }
    let weekday = weekdays(fields[5])?;
    let day = fields[3];
    let year = fields.get(6).copied().unwrap_or("*");
    let line = |day: &str, weekday: &str| {
        let [second, minute, hour, month] = [fields[0], fields[1], fields[2], fields[4]];
        format!("{second} {minute} {hour} {day} {month} {weekday} {year}")
    };
    if is_open(day) || is_open(&weekday) {
        Ok(vec![line(day, &weekday)])
    } else {
        Ok(vec![line(day, "*"), line("*", &weekday)])
    }
}

/// Returns true if a day field leaves the choice to the other day field, as in crontab.
fn is_open(field: &str) -> bool {
    field.starts_with(['*', '?'])
}

/// Maps the numbers 0 to 7 of crontab's weekday field to 1 (Sunday) to 7; names are unchanged.
fn weekdays(field: &str) -> Result<String, String> {
    let items: Result<Vec<String>, String> = field.split(',').map(weekday_item).collect();
    Ok(items?.join(","))
}

fn weekday_item(item: &str) -> Result<String, String> {
    if !item.starts_with(|c: char| c.is_ascii_digit()) {
        return Ok(item.to_owned());
    }
    let wrong = || format!("`{item}` is not a day of the week (0 to 7, or a name)");
    let day = |text: &str| {
        text.parse()
            .ok()
            .filter(|day: &u8| *day <= 7)
            .ok_or_else(wrong)
    };
    let (range, step) = match item.split_once('/') {
        Some((range, step)) => (range, step.parse::<u8>().map_err(|_| wrong())?),
        None => (item, 1),
    };
    let (first, last) = match range.split_once('-') {
        Some((first, last)) => (day(first)?, day(last)?),
        None if item.contains('/') => (day(range)?, 6),
        None => (day(range)?, day(range)?),
    };
    if step == 0 || first > last {
        return Err(wrong());
    }
    let numbers: Vec<String> = (first..=last)
        .step_by(usize::from(step))
        .map(|day| (day % 7 + 1).to_string())
        .collect();
    Ok(numbers.join(","))
}

/// Returns true if the schedule has no time at all. The calendar repeats within 400 years; crate `cron` covers 1970 to
/// 2100, so a search from its first year finds any existing time.
fn never_happens(schedule: &Schedule) -> bool {
    schedule
        .after(&chrono::DateTime::UNIX_EPOCH)
        .next()
        .is_none()
}

/// Returns the reason from the parser's message, which prints it below the expression and a caret.
fn last_line(message: &str) -> String {
    message
        .lines()
        .map(str::trim)
        .rfind(|line| !line.is_empty() && *line != "^")
        .unwrap_or("no reason given")
        .to_owned()
}

#[cfg(test)]
mod tests {
    use chrono::{DateTime, Datelike, Utc, Weekday};
    use proptest::prelude::*;

    use super::*;

    /// Returns the first days, from Thursday 2026-01-01, that match an expression.
    fn days(text: &str, count: usize) -> Vec<DateTime<Utc>> {
        let start = "2025-12-31T23:59:59Z".parse::<DateTime<Utc>>().unwrap();
        let parsed = CronExpression::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        let mut times: Vec<_> = parsed
            .schedules()
            .iter()
            .flat_map(|schedule| schedule.after(&start).take(count))
            .collect();
        times.sort();
        times.dedup();
        times.truncate(count);
        times
    }

    #[test]
    fn numbers_of_weekdays_are_those_of_a_crontab() {
        for (field, weekday) in [
            ("0", Weekday::Sun),
            ("7", Weekday::Sun),
            ("1", Weekday::Mon),
            ("mon", Weekday::Mon),
            ("6", Weekday::Sat),
        ] {
            for text in [format!("0 3 * * {field}"), format!("0 0 3 * * {field}")] {
                let all = days(&text, 5);
                assert!(all.iter().all(|day| day.weekday() == weekday), "{text}");
            }
        }
    }

    #[test]
    fn ranges_and_steps_of_weekdays_are_those_of_a_crontab() {
        for (field, expected) in [
            ("1-5", vec![1, 2, 5, 6, 7, 8, 9]),
            ("5-7", vec![2, 3, 4, 9, 10, 11, 16]),
            ("*/2", vec![1, 3, 4, 6, 8, 10, 11]),
            ("1-5/2", vec![2, 5, 7, 9, 12, 14, 16]),
            ("MON-WED,6", vec![3, 5, 6, 7, 10, 12, 13]),
        ] {
            let found: Vec<u32> = days(&format!("0 3 * * {field}"), 7)
                .iter()
                .map(Datelike::day)
                .collect();
            assert_eq!(found, expected, "{field}");
        }
    }

    #[test]
    fn day_and_weekday_together_mean_either() {
        let found: Vec<u32> = days("0 0 13 * 5", 4).iter().map(Datelike::day).collect();
        assert_eq!(found, [2, 9, 13, 16]);
    }

    #[test]
    fn bad_expressions_say_why() {
        for (text, reason) in [
            ("* * * *", "4 fields instead of 5"),
            ("", "0 fields instead of 5"),
            ("* * * * 8", "`8` is not a day of the week"),
            ("* * * * 5-1", "`5-1` is not a day of the week"),
            ("0 0 30 2 *", "there is no such day"),
            ("61 * * * *", "61"),
            ("*/0 * * * *", "step cannot be zero"),
            ("0 0 * * someday", "someday"),
            ("@reboot", ""),
        ] {
            let error = CronExpression::parse(text).unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
            assert_eq!(error.lines().count(), 1, "{error}");
        }
        assert!(CronExpression::parse(&"* ".repeat(200)).is_err());
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in "[-*/,?@0-9a-zA-Z ]{0,40}|\\PC{0,40}") {
            let _ = CronExpression::parse(&text);
        }
    }
}
