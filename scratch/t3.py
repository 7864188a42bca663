import sys; sys.path.insert(0,"/work/scratch")
from told import *
def lb(fn, x, iters, box=True):
    x = x.clone().requires_grad_()
    opt = torch.optim.LBFGS([x], lr=1, max_iter=iters, history_size=50, line_search_fn="strong_wolfe", tolerance_grad=0, tolerance_change=0)
    def cl():
        opt.zero_grad(); l=fn(x); l.backward(); return l
    opt.step(cl); return x.detach().clamp(0,1)
def go(c, mode, trained, data, kw, iters, stat):
    net,tg,x,y=one(c,mode,trained,data)
    ps=list(net.parameters()); bns=[m for m in net.modules() if isinstance(m,Told)]; Told.tell=False
    torch.manual_seed(0)
    start = torch.full_like(x,.5)+.05*torch.randn_like(x)
    def pen(z, t):
        net(z); return sum(b.pen for b in bns)/len(bns)+t*tv(z)
    if stat:
        for t in (2e-2,2e-3): start = lb(lambda z: pen(z,t), start, stat)
    q=lambda r:(round(-10*math.log10(float((r-x).square().mean())),1), round(float(torch.corrcoef(torch.stack([r.flatten(),x.flatten()]))[0,1]),2))
    out=[q(start), round(float(pen(start,0)),4)]
    # at truth from start
    r,m=run2(net,tg,y,iters,shape=x.shape,truth=x,start=start,switch=0.,**kw)
    return out+[q(r),tuple(round(k,4) for k in m)]
if __name__=="__main__":
    mode, trained, count, iters, data = sys.argv[1], sys.argv[2]=="trained", int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    for v in eval(sys.argv[6]):
        t=time.process_time(); v=dict(v); st=v.pop("stat",150)
        print(mode,trained,data,v,[go(c,mode,trained,data,v,iters,st) for c in range(count)],"cpu %.0f"%((time.process_time()-t)/count),flush=True)
