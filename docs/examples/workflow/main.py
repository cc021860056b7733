# main.py
from stubs import developer, planner, tester

from thunderagent_workflows import deploy, managed_dict, settle

attempts = managed_dict("attempts")  # belongs to the session


def main(goal):
    parts = planner.split(goal)  # a future: the next line waits for its length
    checks = {}
    for number in range(len(parts)):
        checks[number] = tester.check(developer.build(parts[number], 1))  # one future goes into the next call
    while pending := [n for n, check in checks.items() if not (check.available and check.value()["ok"])]:
        for number in pending:
            if checks[number].available:
                attempts[number] = attempts.get(number, 1) + 1
                checks[number] = tester.check(developer.build(parts[number], attempts[number]))
        settle(checks.values(), any=True, timeout=60)  # sleep until one more is there
    return [check.value()["part"] for check in checks.values()]


if __name__ == "__main__":
    with deploy("agents.yaml", proxy="http://127.0.0.1:8300") as app:
        print(app.run(main, "Enable OAuth login", session="user-7"))
        app.write_timeline("user-7", "timeline.html")
