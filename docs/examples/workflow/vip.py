# vip.py
def step(view, act):
    for session in view.changed:
        if session.session.startswith("vip-"):
            act.set_priority(session.session, 10)
